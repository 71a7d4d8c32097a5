"""warmup: compile ahead what linear layers of known sizes will need."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from octavo.brief import brief
from octavo.errors import ConfigError
from octavo.layers.linear import ALIGNMENT
from octavo.numerics.granularity import parse_granularity
from octavo.ops.check import check_fp8_device
from octavo.ops.warm_up import LinearLayers, check_gpu, warm_up_calls
from octavo.recipe import LinearSettings

Shape = tuple[int, int, int]  # tokens, inputs, outputs: (M, K, N)


def warmup(
    shapes: Iterable[Shape],
    linear: str | Mapping[str, Any] | LinearSettings = "fp8",
    *,
    device: torch.device | str | None = None,
    on_call: Callable[[str], object] = lambda name: None,
) -> list[str]:
    """Compile the kernels of FP8 linear layers, so that the first call of each does not wait.

    shapes: (M, K, N): M tokens through a layer of K inputs and N outputs, in bf16, with and without
    a bias. linear: "fp8" or a recipe's settings. What is compiled is kept in OCTAVO_CACHE_DIR
    (docs/reference/environment.md) for other processes. device: a GPU, the current one if left
    out; without one it is an error. on_call: is told the name of each call before it runs. Returns
    the names.
    """
    layers = linear_layers(shapes, linear)
    gpu = check_gpu(device)
    where = gpu.torch_device if device is None else torch.device(device)
    check_fp8(layers, where)
    names = []
    for layer in layers:  # one after the other: each has a weight
        for name, call in warm_up_calls([layer], where):
            on_call(name)
            call()
            names.append(name)
    return names


def linear_layers(
    shapes: Iterable[Shape], linear: str | Mapping[str, Any] | LinearSettings = "fp8"
) -> list[LinearLayers]:
    """The layers of these shapes, as the ops see them: each size once, with all its tokens."""
    settings = LinearSettings.read(linear)
    if settings is None:
        raise ConfigError(f"expected 'fp8' or settings of linear layers, got {linear}")
    tokens: dict[tuple[int, int], set[int]] = {}
    for shape in shapes:
        num_tokens, depth, columns = _checked(shape)
        tokens.setdefault((depth, columns), set()).add(num_tokens)
    if not tokens:
        raise ConfigError("expected shapes (M, K, N) of linear layers, got none")
    return [
        LinearLayers(
            columns=_aligned(columns),
            depth=_aligned(depth),
            rows=tuple(sorted(rows)),
            weight=parse_granularity(settings.weight),
            activation=parse_granularity(settings.activation) if settings.activation else None,
            is_static=settings.scaling == "static",
        )
        for (depth, columns), rows in tokens.items()
    ]


def check_fp8(layers: Iterable[LinearLayers], device: torch.device) -> None:
    """Raise for layers that would raise on a device themselves."""
    if any(layer.activation is not None for layer in layers):
        check_fp8_device("warmup", device, None, instead="warm up weights alone (activation=None)")


def parse_shapes(text: str) -> list[Shape]:
    """The shapes of a text such as 4608x3072x12288,512x3072x3072."""
    shapes = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", part.strip())
        if found is None:
            raise ConfigError(f"expected shapes MxKxN such as 4608x3072x12288, got {part!r}")
        shapes.append(_checked(tuple(map(int, found.groups()))))
    return shapes


def _checked(shape: object) -> Shape:
    match shape:
        case [int(num_tokens), int(depth), int(columns)] if bool not in map(type, shape):
            if min(num_tokens, depth, columns) >= 1:
                return num_tokens, depth, columns
    raise ConfigError(f"expected a shape (M, K, N) of sizes from 1 on, got {brief(shape)}")


def _aligned(size: int) -> int:
    """The size that a layer is padded to."""
    return -(-size // ALIGNMENT) * ALIGNMENT
