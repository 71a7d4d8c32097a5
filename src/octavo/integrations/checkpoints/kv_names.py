"""Names of KV-cache scales in checkpoints, and of the attention layers they belong to.

What is understood (vLLM's maybe_remap_kv_scale_name knows the same):

    model.layers.0.self_attn.k_scale          compressed-tensors, with zero points that must be zero
    model.layers.0.self_attn.attn.k_scale     vLLM's own
    model.layers.0.self_attn.k_proj.k_scale   ModelOpt; NemotronH has mixer for self_attn
    model.layers.0.self_attn.qkv_proj.k_scale
    model.layers.0.self_attn.k_cache.scale    HYV3, and self_attn.q.scale
    model.layers.0.self_attn.k_proj.output_scale   old compressed-tensors and fp8, with a scheme
    model.layers.0.self_attn.kv_scale         deprecated: one for keys and values
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.brief import list_names
from octavo.errors import CheckpointError

_LAYER = r"(?P<layer>(?:.+\.)?(?:self_attn|self_attention|attention|attn|mixer))"
_PART = r"(?P<part>[qkv])"
_KIND = r"(?P<kind>scale|zero_point)"
# Layout -> names; the first that matches decides.
_LAYOUTS = {
    "vllm": re.compile(rf"{_LAYER}\.attn\.{_PART}_{_KIND}"),
    "compressed-tensors": re.compile(rf"{_LAYER}\.{_PART}_{_KIND}"),
    "modelopt": re.compile(rf"{_LAYER}\.(?P<part>[kv])_proj\.(?P=part)_(?P<kind>scale)"),
    "fused": re.compile(rf"{_LAYER}\.qk(?:qk)?v_proj\.(?P<part>[kv])_(?P<kind>scale)"),
    "hyv3_cache": re.compile(rf"{_LAYER}\.(?P<part>[kv])_cache\.(?P<kind>scale)"),
    "hyv3_query": re.compile(rf"{_LAYER}\.(?P<part>q)\.(?P<kind>scale)"),
    "kv_scale": re.compile(rf"{_LAYER}\.(?P<part>kv)_(?P<kind>scale)"),
    "output": re.compile(rf"{_LAYER}\.{_PART}_proj\.output_{_KIND}"),
}
_LOOKS_LIKE_ONE = re.compile(
    r"(?:^|[._])(?:[qkv]|kv|qkv|query|key|value|prob|prob_output)(?:_cache)?"
    r"[._](?:scales?|scale_inv|inv_scale|global_scale|descale|zero_point|amax|scaling_factor)$"
    r"|[._][qkv]_(?:bmm|fake)_quantizer\.|kv_cache"
)
# Modules that hold the language model in one class and not in another: they carry no meaning.
_WRAPPERS = {"model", "language_model", "text_model", "transformer", "backbone", "base_model"}
_HAS_KEYS = re.compile(rf"{_LAYER}\.(?:k_proj|v_proj|qkv_proj|qkqkv_proj|kv_b_proj)\..+")


@dataclass(frozen=True)
class ScaleName:
    """What the name of a KV-cache scale says; part kv is one scale for keys and values."""

    tensor: str
    layer: str
    part: str  # q, k, v, kv
    kind: str  # scale, zero_point
    layout: str


def find_scale_names(tensors: Iterable[str], *, is_output_kv: bool) -> list[ScaleName]:
    """The KV-cache scales among tensors; CheckpointError for any that only look like one.

    is_output_kv: whether the scale of a projection's output is that of the cache.
    """
    found, unknown = [], []
    for tensor in tensors:
        name = parse_scale_name(tensor)
        if name is not None and (name.layout != "output" or is_output_kv):
            found.append(name)
        elif name is None and _LOOKS_LIKE_ONE.search(tensor):
            unknown.append(tensor)
    if unknown:
        raise CheckpointError(
            "expected scales of the KV cache by a known name such as model.layers.0.self_attn."
            f"k_scale, got {list_names(unknown)}"
        )
    return found


def parse_scale_name(tensor: str) -> ScaleName | None:
    """What the name of a tensor says if it is understood as a scale or zero point, else None."""
    for layout, pattern in _LAYOUTS.items():
        if match := pattern.fullmatch(tensor):
            return ScaleName(tensor, match["layer"], match["part"], match["kind"], layout)
    return None


def find_attention(tensors: Iterable[str]) -> list[str]:
    """The attention layers of a checkpoint: whatever projects keys or values, in order."""
    matches = (_HAS_KEYS.fullmatch(tensor) for tensor in tensors)
    return list(dict.fromkeys(match["layer"] for match in matches if match))


def split_number(layer: str) -> tuple[str, int | None]:
    """A layer's name with * for its number, and the number: what layers of a stack share."""
    parts = layer.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    if place is None:
        return layer, None
    return ".".join([*parts[:place], "*", *parts[place + 1 :]]), int(parts[place])


def missing_layers(
    layers: Iterable[str], attention: Iterable[str], num_layers: int | None
) -> list[str]:
    """The layers of the same stacks that are not among `layers`, by `attention`, else by number.

    Layers from num_layers on predict tokens further ahead, and are not run by transformers.
    """
    known = set(layers)
    stacks = {stack for stack, number in map(split_number, known) if number is not None}
    expected = [name for name in attention if split_number(name)[0] in stacks]
    for stack in sorted(stacks - {split_number(name)[0] for name in expected}):
        expected += [stack.replace("*", str(number)) for number in range(num_layers or 0)]
    return [
        name
        for name in expected
        if name not in known and (num_layers is None or (split_number(name)[1] or 0) < num_layers)
    ]


def match_layers(names: Iterable[str], targets: Sequence[str]) -> dict[str, str]:
    """For each layer name the same layer's name among the targets.

    Names that differ only in the modules around the language model are the same layer:
    language_model.model.layers.0.self_attn, model.language_model.layers.0.self_attn and
    model.layers.0.self_attn. CheckpointError if a name has no target, or it is ambiguous.
    """
    known = set(targets)
    by_key: dict[tuple[str, ...], list[str]] = {}
    for target in targets:
        by_key.setdefault(_layer_key(target), []).append(target)
    found: dict[str, str] = {}
    unmatched = []
    for name in names:
        candidates = [name] if name in known else by_key.get(_layer_key(name), [])
        if len(candidates) > 1:
            raise CheckpointError(
                f"expected one layer that {name!r} stands for, got {list_names(candidates)}"
            )
        if not candidates:
            unmatched.append(name)
            continue
        found[name] = candidates[0]
    if unmatched:
        raise CheckpointError(
            f"expected scales for {list_names(list(targets)) or 'no layer'}, "
            f"got some for {list_names(unmatched)}"
        )
    by_target: dict[str, str] = {}
    for name, target in found.items():
        if (other := by_target.setdefault(target, name)) != name:
            raise CheckpointError(
                f"expected the scales of {target!r} once, got {other!r} and {name!r}"
            )
    return found


def _layer_key(name: str) -> tuple[str, ...]:
    stack, number = split_number(name)
    before, _, after = stack.partition("*") if number is not None else ("", "", stack)
    kept = [part for part in before.split(".") if part not in _WRAPPERS]
    return (*kept, str(number), after)
