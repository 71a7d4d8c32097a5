"""Decoders of transformers as the engine runs them: packed tokens in, logits of some of them out.

The tokens of all sequences of a step lie in a batch of one, without padding. Their pages and what
tells them apart come as a keyword of the model, which reaches every attention function.
"""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octavo.brief import brief, list_names
from octavo.cache.spec import PLAIN_DTYPES, CacheSpec
from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.integrations.apply_model import apply_vision_, read_scales, skipped_layers
from octavo.integrations.patch import undo_patches_
from octavo.integrations.transformers import engine_images, kv_cache, text, vision
from octavo.integrations.transformers.decoder_layers import check_call, install, make_layers
from octavo.integrations.transformers.engine_images import ImagePass, has_vision
from octavo.integrations.transformers.joint_projections import JOINT
from octavo.integrations.transformers.saturation import Watch
from octavo.internals import require
from octavo.layers.decoder_attention import DecoderAttention
from octavo.layers.joint_linear import join_named_
from octavo.layers.linear import give_single_tokens_back, take_single_tokens
from octavo.layers.saturation import WATCH
from octavo.numerics.granularity import Granularity, PerHead, PerTensor, PerToken
from octavo.recipe import Recipe

require("torch.nn.Module._compiled_call_impl")

IMPLEMENTATION = "octavo_engine"
STEP = "octavo_step"  # the keyword by which attention gets the step


class AttentionStep(Protocol):
    """What a step is to a model: attention over the pages of its sequences."""

    def attend(
        self,
        attention: DecoderAttention,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store k and v [tokens, num_kv_heads, head_dim] of a layer, attend with q; like q."""


class EngineModel:
    """A decoder with the engine's attention, until `close` gives it back as it was.

    recipe: its kv_cache is what pages hold, its vision_attention is for the tower. vision_impl,
    prefill_impl: implementations of attention in the tower and of prompts; None is the fastest.
    attention: the layers by index. max_context: None if the model does not say how many tokens it
    was made for. eos_tokens: what ends an answer, as `generate` has it.
    """

    def __init__(
        self,
        model: Any,
        recipe: Recipe | None = None,
        *,
        vision_impl: str | None = None,
        prefill_impl: str | None = None,
    ) -> None:
        recipe = Recipe() if recipe is None else recipe
        _check_recipe(recipe, model)
        check_served(model)
        made = make_layers(
            model,
            recipe.kv_cache,
            skip_layers=skipped_layers(model, recipe),
            scales=read_scales(recipe),
            promote_every=recipe.promote_every,
        )
        modules: dict[str, Any] = dict(text.find_layers(model))
        self.model, self.recipe = model, recipe
        _, self._decoder = text.find_decoder(model)
        self.attention = [made[name] for name in modules]
        for layer in self.attention:
            layer.prefill_impl = prefill_impl
        self.device = _one_device(modules)
        self.dtype: torch.dtype = model.dtype
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.head_dim = int(next(iter(modules.values())).head_dim)
        self.num_kv_heads = self.attention[0].num_kv_heads
        self.max_context = max_context(model, config)
        self.eos_tokens = _eos_tokens(model)
        self._watch = Watch()
        self._compiled: list[Any] = []
        self._linears: list[nn.Linear] = []
        apply_vision_(model, recipe, vision_impl=vision_impl)
        _install(model, made)
        # Last: a model that something above refuses stays as it was.
        if self.device.type == "cuda":
            for part in self._parts():
                self._linears += take_single_tokens(part)
        self._joined = join_named_(self._decoder, JOINT)

    def cache_spec(self, page_size: int) -> CacheSpec:
        """What the pages of all layers hold."""
        fp8 = [layer for layer in self.attention if layer.dtype is not None]
        plain = {i for i, layer in enumerate(self.attention) if layer.dtype is None}
        return CacheSpec(
            num_layers=len(self.attention),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=(fp8[0].dtype if fp8 else None) or self.dtype,
            granularity=_granularity(fp8),
            skip_layers=frozenset(plain) if fp8 else frozenset(),
            skip_dtype=self.dtype,
        )

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        step: AttentionStep,
        images: ImagePass | None = None,
    ) -> Tensor:
        """Logits [len(rows), vocab] of some of the packed tokens, by index.

        ids, positions: [tokens] int64, places in their sequences; those of images count if given.
        """
        self.look()
        if images is not None:
            return engine_images.forward(
                self.model, self._decoder, ids, rows, images, **{STEP: step}
            )
        out = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            **{STEP: step},
        )
        logits: Tensor = out.logits[0]
        return logits

    def look(self) -> None:
        """Warn of keys, values and inputs of linear layers that saturated; `forward` calls it."""
        self._watch.look(self._decoder)
        WATCH.look()

    def compile(self) -> None:
        """Compile what lies around attention from the next pass on: norms, products, rotary.

        A pass of one token, and then all others, get a version each: begin with one of one token.
        """
        for part in self._parts():
            if part._compiled_call_impl is None:
                part.compile()
                self._compiled.append(part)

    def _parts(self) -> list[Any]:
        """The layers, and what makes logits of the last one's result."""
        decoder: Any = self._decoder
        head = self.model.get_output_embeddings()
        return [*decoder.layers, *([] if head is None else [head])]

    def close(self) -> None:
        """Give the model back as it was."""
        for part in self._compiled:
            part._compiled_call_impl = None
        give_single_tokens_back(self._linears)
        for joint in self._joined:
            joint.split_()
        self._joined = []  # nor a second copy of the weights
        undo_patches_(self.model, IMPLEMENTATION)
        if self.recipe.vision_attention is not None:
            vision.detach(self.model)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # the name matters: some models give it by keyword
    **call: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [1, heads, tokens, head_dim], all sequences packed."""
    step = call.get(STEP)
    if step is None:
        raise UnsupportedError(
            f"{type(module).__name__}: expected a call by the engine that has this model, got one "
            "without its step: this attention drops keywords, or the model was called by another "
            "(close the engine first)"
        )
    layer = check_call(module, attention_mask, call)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return step.attend(layer, module.layer_idx, q, k, v, call.get("s_aux"))[None], None


def _check_recipe(recipe: Recipe, model: Any) -> None:
    able = {"kv_cache", "vision_attention"} if has_vision(model) else {"kv_cache"}
    if unknown := sorted(recipe.settings().keys() - able):
        raise UnsupportedError(
            f"expected a recipe for {' and '.join(sorted(able))}, got {', '.join(unknown)}, which "
            f"the engine does not do for {type(model).__name__}: leave it out"
        )


def why_not_served(model: Any) -> str | None:
    """Why the engine refuses a model, which may be on the meta device; None if it runs it."""
    return _refusal(check_served, model)


def why_not_paged(model: Any) -> str | None:
    """Why `apply_` cannot give a model an FP8 cache; None if it can. It may be on meta."""
    return _refusal(kv_cache.check_stock_cache, model) or _refusal(_try_attention, model)


def _refusal(check: Callable[[Any], None], model: Any) -> str | None:
    try:
        check(model)
    except UnsupportedError as error:
        return str(error)
    return None


def check_served(model: Any) -> None:
    """UnsupportedError unless the engine can run a model, which may be on meta for advice."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise UnsupportedError(f"expected a model of transformers, got {kind}")
    if model.training:
        raise ConfigError(f"{kind}: expected a model for inference, got one in training: eval() it")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(
            f"{kind}: expected a language model with logits (…ForCausalLM), got one without"
        )
    if others := text.find_others(model):
        raise UnsupportedError(
            f"{kind}: expected attention over keys and values in every layer, got "
            f"{list_names(sorted(set(others.values())))}, whose state no page holds"
        )
    modules: dict[str, Any] = dict(text.find_layers(model))
    indices = [module.layer_idx for module in modules.values()]
    if indices != list(range(len(indices))):
        raise UnsupportedError(f"{kind}: expected layers numbered from 0, got {indices}")
    if model.dtype not in PLAIN_DTYPES:
        raise UnsupportedError(f"{kind}: expected bf16, fp16 or fp32 weights, got {model.dtype}")
    sizes = {(module.head_dim, module.config.num_key_value_heads) for module in modules.values()}
    if len(sizes) > 1:
        raise UnsupportedError(
            f"expected layers with one head_dim and number of KV heads, got {sorted(sizes)}"
        )
    _one_device(modules)
    _try_attention(model)


class _Trial:
    """A step that attends to nothing, and refuses what no page could store."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(
        self,
        attention: DecoderAttention,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """Zeros like q."""
        expected = (len(q), attention.num_kv_heads, q.shape[-1])
        if layer in self.layers or k.shape != expected or v.shape != expected:
            raise UnsupportedError(
                f"{attention.name}: expected one call with keys and values {list(expected)}, got "
                f"{list(k.shape)} and {list(v.shape)} in call {self.layers.count(layer) + 1}"
            )
        self.layers.append(layer)
        return torch.zeros_like(q)


@torch.inference_mode()
def _try_attention(model: Any) -> None:
    """Run one token through a model: only its code knows how it calls attention."""
    kind, made = type(model).__name__, make_layers(model, None)
    trial, device = _Trial(), model.get_input_embeddings().weight.device
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    _install(model, made)
    try:
        with WATCH.paused():
            model(input_ids=token, position_ids=token, use_cache=False, **{STEP: trial})
    except (OctavoError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{kind}: expected to run one token on {device}, got {type(error).__name__}: "
            f"{brief(str(error))}"
        ) from error
    finally:
        undo_patches_(model, IMPLEMENTATION)
    if len(trial.layers) != len(made):
        raise UnsupportedError(
            f"{kind}: expected a call of attention in {len(made)} layers, got {len(trial.layers)}"
        )


def _install(model: Any, made: dict[str, DecoderAttention]) -> None:
    from transformers import AttentionInterface

    # A compiled layer is two parts, before and after attention, which picks its kernels itself.
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(attend))
    install(model, made, IMPLEMENTATION, feature=IMPLEMENTATION)


def _one_device(modules: dict[str, Any]) -> torch.device:
    # FP8 weights are buffers.
    devices: set[torch.device] = {
        x.device for m in modules.values() for part in (m.parameters(), m.buffers()) for x in part
    }
    if torch.device("meta") in devices:  # some constants are on the CPU even then
        return torch.device("meta")
    if len(devices) > 1:
        raise UnsupportedError(
            f"expected a model on one device, got {', '.join(sorted(map(str, devices)))}"
        )
    return devices.pop()


def _granularity(layers: list[DecoderAttention]) -> Granularity:
    """One for all layers: a scale for all heads is a scale for each of them."""
    kinds = {type(layer.granularity) for layer in layers}
    if PerToken in kinds:
        return PerToken()
    return PerHead() if PerHead in kinds else PerTensor()


def max_context(model: Any, config: Any) -> int | None:
    """How many tokens a model was made for; None if its text config does not say."""
    lengths = [text.context_length(config)]
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(kind and (kind == "longrope" or "dynamic" in kind) for kind in kinds):
            # Beyond this length the longest sequence of a pass would turn the keys of all others.
            parameters = config.rope_parameters
            nested = [value for value in parameters.values() if isinstance(value, dict)]
            name = "original_max_position_embeddings"
            lengths += [part.get(name) for part in (parameters, *nested)]
    return min((int(length) for length in lengths if length), default=None)


def _eos_tokens(model: Any) -> frozenset[int]:
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if isinstance(found, list | tuple):
        return frozenset(found)
    return frozenset() if found is None else frozenset([found])
