"""What was changed in a model, and what was left as it is."""

from dataclasses import dataclass, field

from octavo.brief import list_names

# Up to so many layers that stay for one reason have a line of their own.
NUM_LEFT_LINES = 3


@dataclass(frozen=True)
class Changes:
    """What was changed in a model: the layers that each field of a recipe reached.

    fused: those of them whose whole forward was replaced, not only the attention in it; of
    diffusers' layers, those whose norms and rotary embedding are part of the pass that quantizes.
    weight_only: linear layers whose weight alone was quantized because weight_only_layers say so.
    joint: linear layers that read the same input and are one product of it, group by group.
    left: the layers that stay as they are, with the reason: of a kind that the field can do nothing
    to, or left alone on purpose. faster: layers that are not quantized, norms too, and have a form
    that takes less of a GPU's time in 16 bits.
    """

    layers: dict[str, list[str]]
    fused: dict[str, list[str]] = field(default_factory=dict)
    weight_only: dict[str, list[str]] = field(default_factory=dict)
    joint: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    left: dict[str, dict[str, str]] = field(default_factory=dict)
    faster: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for name, layers in self.layers.items():
            kinds = {"fused": self.fused, "weight-only": self.weight_only}
            counts = {kind: len(found.get(name, ())) for kind, found in kinds.items()}
            told = "".join(f", {n} of them {kind}" for kind, n in counts.items() if n)
            if joint := self.joint.get(name):
                told += f", {sum(map(len, joint))} of them joined into {len(joint)} products"
            lines.append(f"{name}: {len(layers)} layers{told}")
            by_reason: dict[str, list[str]] = {}
            for layer, reason in self.left.get(name, {}).items():
                by_reason.setdefault(reason, []).append(layer)
            for reason, left in by_reason.items():
                if len(left) <= NUM_LEFT_LINES:
                    lines += [f"{name}: {layer} stays as it is ({reason})" for layer in left]
                else:
                    kept = f"{len(left)} layers stay as they are ({reason})"
                    lines.append(f"{name}: {kept}: {list_names(left)}")
            if faster := self.faster.get(name):
                lines.append(f"{name}: {len(faster)} plain layers have a faster form on a GPU")
        return "\n".join(lines) or "nothing was changed"
