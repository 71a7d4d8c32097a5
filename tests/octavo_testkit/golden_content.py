"""What the golden recipes and scale files say, as Python."""

from typing import Any

from octavo import Recipe
from octavo.calibration.scale_file import LayerScales, ScaleHeader, ScaleSet

VISION = "visual.blocks.{}.attn.attn"
ATTENTION = "model.layers.{}.self_attn"
MEAN = ((0.5, -0.25, 0.0, 1.5), (-2.0, 0.125, 3.0, -0.75))
LAYERS = {VISION.format(0): {"q": 0.021, "k": 0.034, "v": 0.012}}
STATIC = {"scaling": "static"}
RECIPES = {
    "vision": Recipe(
        vision_attention={"granularity": "head", **STATIC},
        skip_layers=["1-3", r"re:blocks\.9\.", "*.attn"],
        scales="scales.json",
    ),
    "language": Recipe(
        kv_cache={"granularity": "head", "rotate_keys": True, "center_keys": True, **STATIC},
        linear={"weight": "block 128x128"},
        skip_layers=["sliding_window"],
        ignored_layers=["lm_head"],
        weight_only_layers=["down_proj"],
        promote_every=None,
        margin=2.0,
        scales={
            ATTENTION.format(0): {
                "q": 0.03,
                "k": 0.02,
                "v": 0.01,
                "k_heads": [0.02, 0.015],
                "k_mean": MEAN,
            }
        },
    ),
    "tokens": Recipe(
        vision_attention="bf16",
        kv_cache={"granularity": "token", "format": "e5m2"},
        linear={"activation": None},
    ),
    "pipeline": Recipe(
        attention="fp8",
        linear={"weight": "tensor", **STATIC},
        text_encoder="fp8",
        included_layers=["norm_out"],
        components={
            "transformer_2": None,
            "transformer_3": {"linear": "fp8", "weight_only_layers": ["modulation"]},
        },
        scales={
            "octavo": {"format_version": 1, "kind": "pipeline", "margin": 1.25},
            "layers": {"transformer.blocks.0.attn1.to_q": {"input": 0.02}},
        },
    ),
    "inline": Recipe(vision_attention=STATIC, scales=LAYERS),
}

KNOWN: dict[str, Any] = {"model": "tiny", "data": "flowers", "date": "2026-11-17T10:00:00+00:00"}
KNOWN |= {"observer": "amax"}
COUNTED: dict[str, Any] = {"passes": 100, "margin": 1.5}
SCALE_SETS = {
    "vision": ScaleSet(
        {
            VISION.format(10): LayerScales(q=0.021, k=0.034, v=0.012),
            VISION.format(2): LayerScales(q=(0.025, 0.019), k=(0.03, 0.03), v=0.01),
        },
        ScaleHeader(kind="vision_attention", **KNOWN, **COUNTED),
    ),
    "kv": ScaleSet(
        {
            ATTENTION.format(0): LayerScales(q=None, k=0.1, v=1 / 3),
            ATTENTION.format(1): LayerScales(q=None, k=(0.1, 0.7), v=(2.0**-126, 2.0**126)),
        },
        ScaleHeader(kind="kv_cache", **KNOWN, **COUNTED),
    ),
    "kv_rotated_and_centered": ScaleSet(
        {ATTENTION.format(0): LayerScales(q=0.5, k=(0.1, 0.2), v=(0.3, 0.4), k_mean=MEAN)},
        ScaleHeader(kind="kv_cache", rotate_keys=True),
    ),
    "linear": ScaleSet(
        {},
        ScaleHeader(kind="linear", **COUNTED),
        {"model.layers.0.mlp.up_proj": 0.013, "model.layers.0.mlp.down_proj": 1e-3},
    ),
    "pipeline": ScaleSet(
        {"transformer.blocks.0.attn1": LayerScales(q=0.1, k=0.2, v=0.3)},
        ScaleHeader(kind="pipeline", **COUNTED),
        {"transformer.blocks.0.attn1.to_q": 0.02, "transformer_2.blocks.0.ff.net.0": 0.04},
    ),
    "without_header": ScaleSet({"a": LayerScales(q=1, k=2, v=3)}),
}
