"""TeaCache's polynomials: data, with their sources.

A polynomial estimates how much the output of a transformer's blocks changes from how much their
input does. It is fitted to one model: a smaller one of the same class needs one of its own. For
Z-Image, FLUX.2, Wan2.2, HunyuanVideo-1.5 and Cosmos3 no fitted one is known (vllm-omni 0.30 takes
those of FLUX.1 and Qwen-Image for some of them, still "to be tuned"): `fit_tea_cache` makes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from octavo.errors import ConfigError
from octavo.integrations.diffusers.block_layouts import class_names


@dataclass(frozen=True)
class Coefficients:
    """A polynomial, highest power first: the model that it is for, by its size, and its source."""

    values: tuple[float, ...]
    model: str
    size: Mapping[str, int]
    source: str


BY_CLASS: Mapping[str, tuple[Coefficients, ...]] = {
    "FluxTransformer2DModel": (
        Coefficients(
            (4.98651651e02, -2.83781631e02, 5.58554382e01, -3.82021401, 2.64230861e-01),
            model="FLUX.1-dev",
            size={"num_layers": 19, "num_single_layers": 38},
            source="TeaCache4FLUX of ali-vilab/TeaCache; vllm-omni 0.30 has the same",
        ),
        Coefficients(
            (25932.645, -14720.2587, 3089.70585, -281.272785, 9.45977427),
            model="small-image",
            size={"num_layers": 1, "num_single_layers": 5, "num_attention_heads": 3},
            source="octavo.fit_tea_cache: the first 8 of its prompts, 20 steps, float32",
        ),
    ),
    "QwenImageTransformer2DModel": (
        Coefficients(
            (-450.0, 280.0, -45.0, 3.2, -0.02),
            model="Qwen-Image",
            size={"num_layers": 60},
            source="ComfyUI-TeaCache, tuned by hand; vllm-omni 0.30 has the same",
        ),
    ),
}

HOW_TO_FIT = (
    "fit them with octavo.fit_tea_cache(pipe, prompts, num_inference_steps=…) and give them as "
    'config={"coefficients": …}'
)


def known_coefficients(model: nn.Module) -> Coefficients:
    """The polynomial for a model; an error that says how to fit one if there is none."""
    name = type(model).__name__
    found = next((BY_CLASS[base] for base in class_names(model) if base in BY_CLASS), ())
    if not found:
        models = [known.model for group in BY_CLASS.values() for known in group]
        raise ConfigError(
            f"tea_cache: expected coefficients for {name}, got none; known are those of "
            f"{', '.join(models)}: {HOW_TO_FIT}"
        )
    config: Any = model.config
    for known in found:
        if all(config[key] == value for key, value in known.size.items()):
            return known
    size = {key: config[key] for known in found for key in known.size}
    models = [f"{known.model} ({_shown(known.size)})" for known in found]
    raise ConfigError(
        f"tea_cache: expected coefficients for a {name} of {_shown(size)}, got those of "
        f"{', '.join(models)} alone: {HOW_TO_FIT}"
    )


def evaluate(coefficients: Sequence[float], x: float) -> float:
    """The value of a polynomial, highest power first."""
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def _shown(size: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in size.items())
