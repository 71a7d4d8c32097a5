"""Decoders of transformers by name, with random weights, and caches full of random tokens."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.scale_file import LayerScales, ScaleHeader, ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.patch import is_patched
from octavo.integrations.transformers import kv_cache, text
from octavo.integrations.transformers.paged_steps import Pass
from octavo.numerics.granularity import PerHead
from octavo.numerics.scales import amax_to_scale, finite_amax

# Keys and values [batch, num_kv_heads, columns, head_dim] of a layer's columns start … stop.
KeysAndValues = Callable[[int, int, int], tuple[Tensor, Tensor]]
# Columns that are stored at a time.
NUM_COLUMNS = 4096

_SHARED = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1, "tie_word_embeddings": False}


_COLUMNS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def _sizes(row: tuple[str | int, ...], **others: Any) -> dict[str, Any]:
    """The keywords of a config; row: those of _COLUMNS."""
    return dict(zip(_COLUMNS, row, strict=True)) | others


_ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
# Sinks, a window in every other layer and the rotary embedding are the family's own; of its experts
# one is made, and replaced by a DenseMlp of dense_size: four of 2880 see each token of gpt-oss.
_DENSE = {"num_local_experts": 1, "num_experts_per_tok": 1, "sliding_window": 128}
_DENSE |= {"dense_size": 4 * 2880}
_GPT_OSS = {"intermediate_size": 2880, "num_experts_per_tok": 4, "sliding_window": 128}
_GEMMA = {"intermediate_size": 10240, "sliding_window": 1024, "tie_word_embeddings": True}
_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
# Decoders that `make_decoder` makes. In five layers of six, Gemma's have a window.
CONFIGS = {
    "llama-3.1-8b": _sizes(
        ("llama", 32, 4096, 32, 8, 128, 128256, 135168),
        intermediate_size=14336,
        rope_parameters=_ROPE,
    ),
    "tiny": _sizes(("llama", 2, 64, 4, 2, 32, 256, 4096), intermediate_size=128),
    "gpt-oss-like": _sizes(("gpt_oss", 24, 2880, 64, 8, 64, 201088, 131072), **_DENSE),
    "gemma-3-4b": _sizes(("gemma3_text", 34, 2560, 8, 4, 256, 262208, 131072), **_GEMMA),
    "tiny-gpt-oss": _sizes(
        ("gpt_oss", 2, 64, 4, 2, 32, 256, 4096),
        **{**_DENSE, "sliding_window": 32, "dense_size": 128},
    ),
}
# Others, whose work can be told without making their weights; towers are in vision_tower.CONFIGS.
LANGUAGE_MODELS = {
    "gpt-oss-20b": _sizes(
        ("gpt_oss", 24, 2880, 64, 8, 64, 201088, 131072), num_local_experts=32, **_GPT_OSS
    ),
    "gpt-oss-120b": _sizes(
        ("gpt_oss", 36, 2880, 64, 8, 64, 201088, 131072), num_local_experts=128, **_GPT_OSS
    ),
    "qwen3-vl-30b-a3b": _sizes(("qwen3_moe", 48, 2048, 32, 4, 128, 151936, 262144), **_MOE),
    "qwen3-vl-8b": _sizes(("qwen3", 36, 4096, 32, 8, 128, 151936, 262144), intermediate_size=12288),
}


def make_decoder(
    name: str,
    device: torch.device,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """The decoder of a name with random weights, the same ones on every machine of a kind."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name not in CONFIGS:
        raise ConfigError(f"expected one of {', '.join(CONFIGS)}, got {name!r}")
    settings = {**_SHARED, **CONFIGS[name]}
    if num_layers is not None:
        settings["num_hidden_layers"] = num_layers
    dense_size = settings.pop("dense_size", None)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        family: Any = AutoModelForCausalLM
        model = family.from_config(config, dtype=dtype, trust_remote_code=False).eval()
        if dense_size is not None:
            for layer in model.model.layers:
                layer.mlp = DenseMlp(config, dense_size, dtype).eval()
    return model


def about_decoder(model: Any) -> dict[str, str | int]:
    """What a record says of a decoder that `make_decoder` made, beside its name."""
    about: dict[str, str | int] = {"weights": "random", "layers": model.config.num_hidden_layers}
    dense = next((m for m in model.modules() if isinstance(m, DenseMlp)), None)
    if dense is not None:
        about["mlp"] = f"dense {dense.down.in_features} in place of experts"
    return about


class DenseMlp(nn.Module):
    """One gated MLP in place of gpt-oss's router and experts, as large as those a token sees.

    Attention is what is measured, and experts cost what their batch happens to choose.
    """

    def __init__(self, config: Any, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * size, dtype=dtype)
        self.down = nn.Linear(size, config.hidden_size, dtype=dtype)
        self.alpha, self.limit = 1.702, 7.0  # gpt-oss's
        for linear in (self.gate_up, self.down):
            nn.init.normal_(linear.weight, std=config.initializer_range)
            nn.init.zeros_(linear.bias)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """As gpt-oss's MLP is called, which returns the router's scores as well."""
        gate, up = self.gate_up(hidden_states).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down((up + 1) * gate * torch.sigmoid(gate * self.alpha)), None


def make_static_cache(model: Any, max_length: int) -> Any:
    """A cache with room for so many tokens, which never moves."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=max_length)


def counts_on_host(cache: Any) -> bool:
    """Whether replays of a CUDA graph would see the number of tokens that its capture saw.

    So it is in transformers' static layers with a window; ours count on the device.
    """
    from transformers.cache_utils import StaticSlidingWindowLayer

    return any(isinstance(layer, StaticSlidingWindowLayer) for layer in cache.layers)


def random_keys_and_values(model: Any, batch: int) -> KeysAndValues:
    """Normal keys and values for a model's cache: the same for the same columns of a layer.

    Values of a head have a mean, as large as they scatter: else attention to many keys comes to
    nothing (1 / √keys), and no logit tells whether there was any.
    """
    modules: dict[int, Any] = {m.layer_idx: m for m in text.find_layers(model).values()}  # type: ignore[misc]
    weight = next(model.parameters())

    def normal(layer: int, of: int, num_columns: int) -> Tensor:
        one = modules[layer]
        shape = (batch, one.config.num_key_value_heads, num_columns, one.head_dim)
        generator = torch.Generator(weight.device).manual_seed(hash((0, layer, of)))
        return torch.randn(shape, generator=generator, dtype=weight.dtype, device=weight.device)

    def draw(layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        key, value = (normal(layer, 2 * start + i, stop - start) for i in (1, 2))
        return key, value.add_(normal(layer, 0, 1))

    return draw


def fill_cache(model: Any, cache: Any, source: KeysAndValues, length: int) -> None:
    """Store keys and values of so many tokens in a cache, transformers' or ours, without a pass."""
    _, decoder = text.find_decoder(model)
    has_pages = is_patched(decoder, kv_cache.FEATURE)
    sequences = kv_cache.convert(cache, decoder) if has_pages else None
    for start, stop in _parts(length):
        run = None if sequences is None else Pass(cache.layers, sequences)
        for index, layer in enumerate(cache.layers):
            key, value = source(index, start, stop)
            cache.update(key, value, index)
            if run is not None:
                layer.store(key.transpose(1, 2), value.transpose(1, 2), run)


def find_scales(model: Any, source: KeysAndValues, length: int) -> ScaleSet:
    """The scales per head of so many tokens' keys and values, from their amax."""
    layers = {}
    for name, module in text.find_layers(model).items():
        parts = (source(module.layer_idx, *part) for part in _parts(length))  # type: ignore[arg-type]
        amaxes = [
            torch.stack([finite_amax(x.transpose(1, 2), PerHead()) for x in part]) for part in parts
        ]
        k, v = amax_to_scale(torch.stack(amaxes).amax(0)).tolist()
        layers[name] = LayerScales(None, tuple(k), tuple(v))
    return ScaleSet(layers, ScaleHeader(kind="kv_cache"))


def _parts(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, NUM_COLUMNS):
        yield start, min(start + NUM_COLUMNS, length)


def cache_bytes(cache: Any) -> int:
    """Bytes of a cache's keys and values, its own or ours, with the scales beside them."""
    total = 0
    for layer in cache.layers:
        total += getattr(layer, "nbytes", None) or layer.keys.nbytes + layer.values.nbytes
    return total
