"""FP8 layers that are given the same input, as one product of it.

Projections such as q, k and v read the same tokens: one product quantizes them once, and its
columns are enough to keep all of a GPU busy where those of a single layer are not. Each layer stays
where its model has it and gives its own part of the product.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.internals import require
from octavo.layers.linear import ALIGNMENT, Fp8Linear
from octavo.layers.saturation import SaturationCounter
from octavo.numerics.granularity import PerBlock, PerChannel

require(
    "torch.nn.Module._apply",
    "torch.nn.Module._buffers",
    "torch.nn.Module._load_from_state_dict",
    "torch.nn.Module._save_to_state_dict",
)

TENSORS = ("weight", "weight_scale", "bias", "input_scale")


class JointLinear:
    """The product of several FP8 layers; weights, scales and biases become parts of one tensor.

    What is changed in place in a layer is changed in the product. The layers move together: moving
    one moves all. A layer that is given another tensor is split from the others first, and so is
    one whose weight was put aside past its attributes (accelerate's `set_module_tensor_to_device`)
    when it is called. A new `.data` is not noticed. Static layers share one input_scale: changed in
    place in one it is changed in all; `set_input_scale_` splits them first.

    The first of the layers computes all parts, the others take theirs if they are given the same
    tensor: it must not be changed in between. A layer that is given another one computes its own
    part alone. CUDA graphs may have seen `whole`: its memory stays until the layers leave it or the
    device.
    """

    def __init__(self, layers: Sequence[Fp8Linear]) -> None:
        self.layers = tuple(layers)
        self.sizes = [layer.out_features for layer in layers]
        # What the first layer was given, and the parts that nobody has taken yet, by index.
        self._open: tuple[Tensor, dict[int, Tensor]] | None = None
        first = layers[0]
        names = ["weight", "weight_scale"] + ["bias"] * (first.bias is not None)
        tensors = {name: torch.cat([getattr(layer, name) for layer in layers]) for name in names}
        self.whole = Fp8Linear(
            first.in_features,
            sum(self.sizes),
            first.settings,
            bias="bias" in names,
            dtype=first.compute_dtype,
            device="meta",
            name=" + ".join(layer.name for layer in layers),
            impl=first.impl,
        )
        self.whole.is_joint = True
        self.whole.take_(tensors)
        if first.input_scale is not None:
            self.whole.take_({"input_scale": first.input_scale.clone()})
        self._rows = {name: [len(getattr(layer, name)) for layer in layers] for name in names}
        for index, layer in enumerate(layers):
            layer.saturation = self.whole.saturation  # one input, one scale
            layer.__class__ = JointPart
            vars(layer).update(joint=self, joint_index=index)
        self.share_()

    def share_(self) -> None:
        """Make the layers' tensors parts of the product's: nothing is there twice."""
        for name, rows in self._rows.items():
            parts = getattr(self.whole, name).split(rows)
            for layer, part in zip(self.layers, parts, strict=True):
                # Past JointPart's own, which would split them.
                own = nn.Parameter(part, False) if name == "bias" else part
                nn.Module.__setattr__(layer, name, own)
        for layer in self.layers:
            if (scale := self.whole.input_scale) is not None:
                nn.Module.__setattr__(layer, "input_scale", scale)
            vars(layer)["joint_weight"] = layer.weight

    def take(self, index: int, input: Tensor) -> Tensor | None:
        """The part of one layer; None if the product at hand is of another input."""
        if index == 0:
            # Past Module.__call__ and Tensor.split, which cost the host more than this does.
            out = self.whole.forward(input)
            parts = dict(enumerate(out.split_with_sizes(self.sizes, -1)))
            first = parts.pop(0)
            # What a pass that was broken off has left behind never outlives this.
            self._open = (input, parts)
            return first
        # Read once: another thread may have begun a product of its own.
        found = self._open
        if found is None or found[0] is not input:
            return None
        parts = found[1]
        part = parts.pop(index, None)
        if not parts:
            self._open = None
        return part

    def move_(self, *args: Any, **kwargs: Any) -> None:
        """Move all layers, or change their dtype, as `nn.Module._apply` does: still one product."""
        self.whole._apply(*args, **kwargs)
        self.share_()

    def split_(self) -> None:
        """Let the layers compute by themselves again, each with a weight of its own."""
        for layer in self.layers:
            # Else something has split them before, and somebody may have joined them again.
            if vars(layer).get("joint") is self:
                for name in ("joint", "joint_index", "joint_weight"):
                    del vars(layer)[name]
                layer.__class__ = Fp8Linear
                if layer.saturation is not None:
                    layer.saturation = SaturationCounter(layer.name)
                for name in TENSORS:
                    if (x := getattr(layer, name)) is not None:
                        own = x.detach().clone()
                        setattr(layer, name, nn.Parameter(own, False) if name == "bias" else own)
        self._open = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": None}  # results of a pass are nobody's


class JointPart(Fp8Linear):
    """An Fp8Linear whose result is a part of a joint product."""

    joint: JointLinear
    joint_index: int
    joint_weight: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """As Fp8Linear; rows of the result are those of the joint product."""
        # None: accelerate's hooks keep this method when the layer is an Fp8Linear again.
        joint = getattr(self, "joint", None)
        if joint is None:
            return Fp8Linear.forward(self, input)
        if self._buffers["weight"] is not self.joint_weight:
            if joint.layers[self.joint_index] is self:  # not one of DataParallel's replicas
                joint.split_()
            return Fp8Linear.forward(self, input)
        part = joint.take(self.joint_index, input)
        return Fp8Linear.forward(self, input) if part is None else part

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

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        # A model goes on to the other layers, which are where they should be by then.
        self.joint.move_(*args, **kwargs)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # The layers share it, which transformers refuses to save.
        if (scale := destination.get(f"{prefix}input_scale")) is not None:
            destination[f"{prefix}input_scale"] = scale.clone()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.input_scale is None:
            super()._load_from_state_dict(*args, **kwargs)  # in place, or by attributes
        else:  # each of the layers may be given a scale of its own
            self.joint.split_()
            self._load_from_state_dict(*args, **kwargs)


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


def join_children_(module: nn.Module, groups: Sequence[Sequence[str]]) -> list[JointLinear]:
    """Join the children of these names, if a module has them all and they can be."""
    children = dict(module.named_children())
    joined = []
    for group in groups:
        layers = [children[child] for child in group if child in children]
        if len(layers) == len(group) and objection(layers) is None:
            joined.append(join_(layers))
    return joined


def join_named_(
    model: nn.Module, groups: Sequence[Sequence[str]], *, without: Sequence[str] = ()
) -> list[JointLinear]:
    """`join_children_` of every module in a model.

    without: names of modules that are left as they are.
    """
    joined = []
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] not in without:
            joined += join_children_(module, groups)
    return joined
