"""Layers that stay in 16 bits beside FP8 ones, in forms that take less of a GPU's time.

They compute what they did, with no rounding more. A layer takes a form by its class: weights and
names stay, and adapters, hooks and offloading find the module that they know. Where a form does not
apply to a call, the layer runs as it was.
"""

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn

from octavo import ops

# Where these forms are the faster ones.
DEVICES = ("cuda",)
# What divides sizes of products that can have GELU at their end (`ops.linear_gelu`).
FUSED_SIZES = 8
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class FusedGelu(GELU):  # type: ignore[misc]
    """GELU in the product in front of it: the wide result is written once, and not read again."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As diffusers' GELU."""
        if not _is_plain(self.proj, hidden_states):
            result: Tensor = super().forward(hidden_states)
            return result
        return ops.linear_gelu(hidden_states, self.proj.weight, self.proj.bias)


class TwoPassLayerNorm(nn.LayerNorm):
    """LayerNorm that a compiler makes two sums of: of the values, then of squares around the mean.

    torch.compile's own form finds both in one pass over wide rows, by Welford's update of every
    value, which takes longer than to read them twice.
    """

    def forward(self, input: Tensor) -> Tensor:
        """As nn.LayerNorm."""
        if not (torch.compiler.is_compiling() and self._is_for(input)):
            return super().forward(input)
        return two_pass_layer_norm(input, self.weight, self.bias, self.eps)

    def _is_for(self, x: Tensor) -> bool:
        """Whether x is normalized in its own dtype, and is what nn.LayerNorm would take."""
        if x.device.type not in DEVICES or torch.is_autocast_enabled(x.device.type):
            return False
        if x.dtype not in (*_SIXTEEN_BITS, torch.float32) or x.dim() == 0:
            return False
        has_own_dtype = self.weight is None or self.weight.dtype == x.dtype  # type: ignore[redundant-expr]
        return has_own_dtype and x.shape[-1] == self.normalized_shape[0]


def two_pass_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """LayerNorm over the last dimension, in float32 until the result is rounded to x's dtype."""
    centered = x.float() - x.float().mean(-1, keepdim=True)
    out = centered * torch.rsqrt((centered * centered).mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype)


def use_faster_forms_(model: nn.Module) -> list[str]:
    """Let plain layers of a diffusers model take these forms; returns the names of those that do.

    GELU by its tanh formula behind a linear layer with a bias, of sizes that 8 divides, and norms
    over one dimension.
    """
    names = []
    for name, part in model.named_modules():
        if type(part) is GELU and part.approximate == "tanh" and _has_fused_sizes(part.proj):
            part.__class__ = FusedGelu
            names.append(name)
        elif type(part) is nn.LayerNorm and len(part.normalized_shape) == 1:
            part.__class__ = TwoPassLayerNorm
            names.append(name)
    return names


def _has_fused_sizes(proj: nn.Module) -> bool:
    """Whether GELU can be part of the product: cuBLAS would round others first."""
    if type(proj) is not nn.Linear or proj.bias is None:
        return False
    return proj.in_features % FUSED_SIZES == 0 and proj.out_features % FUSED_SIZES == 0


def _is_plain(proj: nn.Module, x: Tensor) -> bool:
    """Whether x may go past the module `proj` to its weights, as they were when it was made."""
    if type(proj) is not nn.Linear or x.device.type not in DEVICES:
        return False
    weight, bias = proj.weight, proj.bias
    # A weight of another class, such as torchao's, has products of its own.
    if bias is None or type(weight) is not nn.Parameter or type(bias) is not nn.Parameter:  # type: ignore[redundant-expr]
        return False
    if x.dtype not in _SIXTEEN_BITS or weight.dtype != x.dtype or bias.dtype != x.dtype:
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    # Such as those that bring offloaded weights when the module is called.
    if "forward" in proj.__dict__ or any(getattr(proj, hooks) for hooks in _HOOKS):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias)))
