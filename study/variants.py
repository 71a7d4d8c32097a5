"""What the study measures: cases, modes, and the launch settings worth a try. No GPU needed."""

import itertools
from dataclasses import replace

from octavo.kernels.attention.config import GluonConfig, default_gluon, is_valid_gluon
from octavo.numerics.attention import AttentionSpec

MODES = {
    "exact": AttentionSpec(exponentials="exact"),
    "codes": AttentionSpec(exponentials="codes"),
    "exact1": AttentionSpec(exponentials="exact", promote_every=None),  # one level
    "codes1": AttentionSpec(exponentials="codes", promote_every=None),
}
# batch, tokens, heads, heads of keys, head_dim, causal; the most wanted first
CASES = {
    "d128": (1, 8192, 16, 16, 128, False),
    "d64": (1, 8192, 16, 16, 64, False),
    "d72": (1, 8192, 16, 16, 72, False),
    "d96": (1, 8192, 16, 16, 96, False),
    "d256": (1, 8192, 16, 16, 256, False),
    "c128": (1, 16384, 32, 8, 128, True),
    "c64": (1, 8192, 64, 8, 64, True),
    "d80": (1, 8192, 16, 16, 80, False),
    "d192": (1, 8192, 16, 16, 192, False),
    "c192": (1, 8192, 16, 16, 192, True),
    "c256": (1, 8192, 8, 4, 256, True),
    "short": (8, 1024, 32, 8, 128, True),
    "s64": (8, 1024, 64, 8, 64, True),
    "mid": (4, 2048, 32, 32, 128, False),
    "b2": (2, 8192, 64, 8, 128, True),
    "c128l": (1, 32768, 32, 8, 128, True),
}
FIRST = ("d128", "d64", "d72", "d96", "d256", "c128")


def spec_of(case: str, mode: str) -> AttentionSpec:
    return replace(MODES[mode], causal=CASES[case][5])


def variants(case: str, mode: str) -> dict[str, GluonConfig]:
    """Launch settings by name, the default first; those equal to another are left out."""
    head_dim, is_causal = CASES[case][4:]
    spec = spec_of(case, mode)
    has_codes, is_one_level = spec.exponentials == "codes", spec.promote_every is None
    orders = {"": {}, "+pers": {"is_persistent": True}}
    if is_causal:
        orders = {
            "": {},
            "+long": {"is_longest_first": True},
            "+pers+long": {"is_persistent": True, "is_longest_first": True},
        }
    if head_dim <= 128:
        shapes = {"n128": {}}
        if head_dim <= 96 or is_one_level:  # three consumers spill by hundreds at 128
            shapes["n64c3"] = {"block_n": 64, "num_consumers": 3}
        if head_dim <= 64:
            shapes["n128s8"] = {"num_stages": 8}
    elif is_one_level:
        shapes = {"n64": {"block_n": 64}}
        if head_dim < 256:  # which spills 300 words a tile, or ptxas puts products in a line
            shapes["n128s2"] = {"num_stages": 2}
    else:
        shapes = {f"n64w{w}": {"block_n": 64, "part_width": w} for w in (64, 32)}
        shapes["n32s8"] = {"block_n": 32, "num_stages": 8}
    firsts = (True, False) if has_codes and (head_dim <= 128 or is_one_level) else (False,)
    ones = (True,) if has_codes or head_dim <= 80 else (False, True)
    loops = (False, True) if is_causal else (False,)
    found = {"default": default_gluon(head_dim, spec)}
    for (shape, sizes), (order, jobs), is_first, has_ones, has_one_loop in itertools.product(
        shapes.items(), orders.items(), firsts, ones, loops
    ):
        if has_one_loop and (order or shape != next(iter(shapes))):
            continue
        config = GluonConfig(
            **sizes,
            **jobs,
            encodes_first=is_first,
            has_ones=has_ones,
            has_one_loop=has_one_loop,
        )
        name = shape + order + "+first" * is_first
        name += "+ones" * (has_ones and not has_codes) + "+loop" * has_one_loop
        effective = replace(config, has_ones=has_ones and not has_codes)
        same = replace(found["default"], has_ones=found["default"].has_ones and not has_codes)
        if is_valid_gluon(config, head_dim, spec) and effective != same:
            found[name] = config
    return found
