"""FP8 layers that are given the same input, as one product of it.

Projections such as q, k and v read the same tokens: one product quantizes them once, and its
columns are enough to keep all of a GPU busy where those of a single layer are not. Each layer stays
where its model has it and gives its own part of the product.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.internals import require
from octavo.layers.linear import ALIGNMENT, Fp8Linear
from octavo.layers.saturation import SaturationCounter
from octavo.numerics.granularity import PerBlock, PerChannel

require(
    "torch.nn.Module._apply",
    "torch.nn.Module._load_from_state_dict",
    "torch.nn.Module._save_to_state_dict",
)

TENSORS = ("weight", "weight_scale", "bias", "input_scale")


class JointLinear:
    """The product of several FP8 layers; weights, scales and biases become parts of one tensor.

    What is changed in place in a layer is changed in the product; a layer that is given another
    tensor is split from the others first. What goes round a layer's attributes is not noticed: a
    new `.data`, or accelerate's `set_module_tensor_to_device`. Static layers share one input_scale:
    changed in place in one it is changed in all; `set_input_scale_` splits them first.

    The first of the layers computes all parts, the others take theirs if they are given the same
    tensor: it must not be changed in between. A layer that is given another one computes its own
    part alone. CUDA graphs may have seen `whole`: it lives as long as this.
    """

    def __init__(self, layers: Sequence[Fp8Linear]) -> None:
        self.layers = tuple(layers)
        self.sizes = [layer.out_features for layer in layers]
        # What the first layer was given, and the parts that nobody has taken yet.
        self._open: tuple[Tensor, list[Tensor | None]] | None = None
        first = layers[0]
        bias: Tensor | None = first.bias
        tensors = {"weight": torch.cat([layer.weight for layer in layers])}
        tensors["weight_scale"] = torch.cat([layer.weight_scale for layer in layers])
        if bias is not None:
            tensors["bias"] = torch.cat([layer.bias for layer in layers])
        self.whole = Fp8Linear(
            first.in_features,
            sum(self.sizes),
            first.settings,
            bias=bias is not None,
            dtype=first.compute_dtype,
            device="meta",
            name=" + ".join(layer.name for layer in layers),
            impl=first.impl,
        )
        self.whole.is_joint = True
        self.whole.take_(tensors)
        if first.input_scale is not None:
            self.whole.take_({"input_scale": first.input_scale.clone()})
            for layer in layers:
                layer.input_scale = self.whole.input_scale
        for name in tensors:
            rows = [len(getattr(layer, name)) for layer in layers]
            # Views: nothing is there twice.
            for layer, part in zip(layers, getattr(self.whole, name).split(rows), strict=True):
                _set(layer, name, part)
        for index, layer in enumerate(layers):
            layer.saturation = self.whole.saturation  # one input, one scale
            layer.__class__ = JointPart
            vars(layer).update(joint=self, joint_index=index)

    def take(self, index: int, input: Tensor) -> Tensor | None:
        """The part of one layer; None if the product at hand is of another input."""
        if index == 0:
            # What a pass that was broken off has left behind never outlives this.
            parts: list[Tensor | None] = list(self.whole(input).split(self.sizes, -1))
            first, parts[0] = parts[0], None
            self._open = (input, parts)
            return first
        # Read once: another thread may have begun a product of its own.
        found = self._open
        if found is None or found[0] is not input:
            return None
        parts = found[1]
        part, parts[index] = parts[index], None
        if all(other is None for other in parts):
            self._open = None
        return part

    def split_(self) -> None:
        """Let the layers compute by themselves again, each with a weight of its own."""
        for layer in self.layers:
            # Else moving the model has split them, and somebody may have joined them again.
            if vars(layer).get("joint") is self:
                del vars(layer)["joint"], vars(layer)["joint_index"]
                layer.__class__ = Fp8Linear
                if layer.saturation is not None:
                    layer.saturation = SaturationCounter(layer.name)
                for name in TENSORS:
                    if (x := getattr(layer, name)) is not None:
                        _set(layer, name, x.detach().clone())
        self._open = None


def _set(layer: Fp8Linear, name: str, x: Tensor) -> None:
    setattr(layer, name, nn.Parameter(x, False) if name == "bias" else x)


class JointPart(Fp8Linear):
    """An Fp8Linear whose result is a part of a joint product; it leaves it when it is moved."""

    joint: JointLinear
    joint_index: int

    def forward(self, input: Tensor) -> Tensor:
        """As Fp8Linear; rows of the result are those of the joint product."""
        part = self.joint.take(self.joint_index, input)
        return super().forward(input) if part is None else part

    def __setattr__(self, name: str, value: Any) -> None:
        if name in TENSORS:
            self.joint.split_()
            setattr(self, name, value)
        else:
            super().__setattr__(name, value)

    def set_input_scale_(self, input_scale: float | None) -> None:
        """As Fp8Linear, which it is again."""
        self.joint.split_()
        self.set_input_scale_(input_scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> "JointPart":
        own: Tensor | None = self.bias
        if own is not None and id(own) not in memo:
            # Parameters are copied one by one: parts of one tensor would be tensors of their own.
            layers, bias = self.joint.layers, deepcopy(self.joint.whole, memo).bias
            for layer, part in zip(layers, bias.split(self.joint.sizes), strict=True):
                memo[id(layer.bias)] = nn.Parameter(part, False)
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(deepcopy(vars(self), memo))
        return made

    def quantize_weight_(self, weight: Tensor) -> None:
        """As Fp8Linear, which it is again."""
        self.joint.split_()
        self.quantize_weight_(weight)

    def take_(self, tensors: Mapping[str, Tensor]) -> None:
        """As Fp8Linear, which it is again."""
        self.joint.split_()
        self.take_(tensors)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.joint.split_()
        return self._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.joint.split_()
        self._load_from_state_dict(*args, **kwargs)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Files have no views: a part alone, not the memory of all.
        for name in TENSORS:
            if (x := destination.get(f"{prefix}{name}")) is not None:
                destination[f"{prefix}{name}"] = x.clone()


def objection(layers: Sequence[nn.Module]) -> str | None:
    """Why layers cannot be one product; None if they can."""
    plain = [layer for layer in layers if type(layer) is not Fp8Linear]
    if plain or len(layers) < 2:
        return f"expected several layers in FP8, got {len(layers)}, {len(plain)} of another kind"
    found = [layer for layer in layers if isinstance(layer, Fp8Linear)]
    if len({(one.in_features, one.settings, one.impl, one.weight.device) for one in found}) > 1:
        return "expected layers of one width, device and kind of scales"
    biases: list[Tensor | None] = [one.bias for one in found]
    if len({None if bias is None else bias.dtype for bias in biases}) > 1:
        return "expected layers that all have a bias of one dtype, or none"
    granularity = found[0].weight_granularity
    if not isinstance(granularity, PerChannel | PerBlock):
        return "expected weights with scales per channel or block"
    if len({None if (x := one.input_scale) is None else float(x) for one in found}) > 1:
        return "expected one scale for the input, got several"
    height = granularity.rows if isinstance(granularity, PerBlock) else ALIGNMENT
    if any(one.out_features % height or one.in_features % ALIGNMENT for one in found):
        return f"expected inputs in multiples of {ALIGNMENT}, and outputs of {height}"
    return None


@torch.no_grad()
def join_(layers: Sequence[nn.Module]) -> JointLinear:
    """Make layers that are given the same input one product of it; `split_` undoes it."""
    if (reason := objection(layers)) is not None:
        raise ConfigError(reason)
    return JointLinear([layer for layer in layers if isinstance(layer, Fp8Linear)])


def join_named_(
    model: nn.Module, groups: Sequence[Sequence[str]], *, without: Sequence[str] = ()
) -> list[JointLinear]:
    """Join the children of these names, wherever a module has them all and they can be.

    without: names of modules that are left as they are.
    """
    joined = []
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in without:
            continue
        children = dict(module.named_children())
        for group in groups:
            layers = [children[child] for child in group if child in children]
            if len(layers) == len(group) and objection(layers) is None:
                joined.append(join_(layers))
    return joined
