"""`--mm-encoder-attn-dtype fp8`: attention of vision encoders in FP8, on GPUs where vLLM has none.

vLLM's flags say where scales come from: a scale file, or the largest absolute values of the last
passes, which can be saved as such a file.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import MMEncoderAttention
from vllm.model_executor.models.vision import get_multimodal_config
from vllm.platforms import current_platform

from octavo.calibration.autosave import ScaleSaver
from octavo.calibration.scale_file import ScaleHeader, ScaleSet, load_scales
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.attention_layers import as_tensors
from octavo.integrations.vllm.names import ENCODER_FLAG, LOGGER, warn_on_gpu
from octavo.layers.encoder_attention import EncoderAttention
from octavo.ops.check import check_fp8_device
from octavo.recipe import AttentionSettings

INSTEAD = f"leave {ENCODER_FLAG} out"
# Passes after which scales should have been saved.
PATIENCE = 64


class OctavoEncoderAttention(MMEncoderAttention):
    """An encoder's attention layer inside vLLM: octavo's if FP8 was asked for, else vLLM's own.

    With --mm-encoder-attn-backend, FP8 is vLLM's own, too: octavo is none of those backends.
    """

    def _init_fp8_state(self) -> None:
        self.octavo: EncoderAttention | None = None
        self.saver: LoggingSaver | None = None
        self.asked = _asked_for()
        if self.asked is None:
            super()._init_fp8_state()
            return
        _check(self.layer_name, self.asked)
        self.fp8_enabled = False  # of vLLM's own path
        _LOADING.append(self)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Quantize from here on: all layers of the model are known now."""
        if self.asked is None:
            super().process_weights_after_loading(act_dtype)
        elif self.octavo is None:
            # A model that failed to load has left its layers here.
            layers = [layer for layer in _LOADING if layer.asked is self.asked]
            _LOADING.clear()
            _finish(layers, self.asked)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | int | None = None,
        sequence_lengths: Tensor | None = None,
    ) -> Tensor:
        """Attention of [batch, tokens, …], heads apart or side by side, laid out as `query` is.

        cu_seqlens: of sequences that lie one after the other in the tokens of the whole batch.
        """
        if self.asked is None:
            out: Tensor = super().forward(
                query, key, value, cu_seqlens, max_seqlen, sequence_lengths
            )
            return out
        assert self.octavo is not None, f"{self.layer_name}: its weights have not been processed"
        if cu_seqlens is None:
            out = self.octavo(query, key, value)
        else:
            q, k, v = (x.flatten(0, 1) for x in (query, key, value))
            starts, longest = cu_seqlens.to(torch.int32), _longest(max_seqlen, len(q))
            out = self.octavo(q, k, v, cu_seqlens=starts, max_seqlen=longest).reshape(query.shape)
        if self.saver is not None:
            self.saver.step()
        return out


class LoggingSaver(ScaleSaver):
    """Says in vLLM's log when scales are saved or, after 64 passes, which layers it waits for.

    It steps after each pass of each layer: 16 passes of all layers are a multiple of 16 steps, at
    which it looks.
    """

    num_steps_left = 0

    def step(self) -> None:
        """One more layer has seen a pass."""
        was_saved = self.is_saved
        super().step()
        self.num_steps_left -= 1
        logger = init_logger(LOGGER)
        if self.is_saved and not was_saved:
            logger.info("octavo has saved the encoder's scales to %s", self.path)
        elif self.num_steps_left == 0 and not was_saved:
            try:
                self.close()
            except ConfigError as error:
                logger.warning(str(error))


# Layers that wait for the others of their model.
_LOADING: list[OctavoEncoderAttention] = []


def _asked_for() -> Any:
    """vLLM's settings of multimodal models if they ask for FP8 that octavo provides, else None."""
    settings = get_multimodal_config()
    if settings is None or settings.mm_encoder_attn_dtype != "fp8":
        return None
    is_ours = current_platform.is_cuda() or current_platform.is_cpu()
    return settings if is_ours and settings.mm_encoder_attn_backend is None else None


def _check(name: str, settings: Any) -> None:
    """Raise for what FP8 cannot be combined with, before any weight is loaded."""
    config = get_current_vllm_config()
    check_fp8_device(name, torch.device(current_platform.device_type), None, instead=INSTEAD)
    compilation, parallel = config.compilation_config, config.parallel_config
    is_saving = settings.mm_encoder_fp8_scale_save_path is not None
    num_processes = parallel.world_size * parallel.data_parallel_size
    saving = "--mm-encoder-fp8-scale-save-path"
    for is_bad, reason in (
        (
            compilation.compile_mm_encoder,
            f"{ENCODER_FLAG} fp8 does not support compile_mm_encoder: leave one of them out",
        ),
        (
            is_saving and compilation.cudagraph_mm_encoder,
            f"{saving} does not support cudagraph_mm_encoder, whose replays cannot be counted: "
            "leave one of them out",
        ),
        (
            is_saving and num_processes > 1,
            f"{saving} expects an engine of one process, which sees all heads and images, got "
            f"{num_processes}: save with one, and load with as many as you like",
        ),
    ):
        if is_bad:
            raise UnsupportedError(reason)


def _finish(layers: Sequence[OctavoEncoderAttention], settings: Any) -> None:
    """Give a model's layers their attention in FP8, with scales as the settings ask for."""
    path, save_path = settings.mm_encoder_fp8_scale_path, settings.mm_encoder_fp8_scale_save_path
    names = [layer.layer_name for layer in layers]
    fp8 = AttentionSettings(scaling="dynamic" if path is None else "static")
    found: ScaleSet | None = None
    if path is not None:
        found = load_scales(path)
        found.require_kind("vision_attention")
        found.require(names)
    with torch.device(current_platform.device_type):
        for layer in layers:
            name = layer.layer_name
            layer.octavo = EncoderAttention(
                layer.num_heads,
                layer.head_size,
                float(layer.scale),
                layer.num_kv_heads,
                name,
                fp8=fp8,
                scales=None if found is None else as_tensors(found.layer(name), fp8, name),
            )
    warn_on_gpu()
    init_logger(LOGGER).info(
        "octavo runs attention in FP8 in %d layers of the vision encoder, with %s",
        len(layers),
        "dynamic scales" if path is None else f"static scales from {path}",
    )
    if save_path is not None:
        _save_scales(layers, save_path, settings.mm_encoder_fp8_scale_save_margin)


def _save_scales(layers: Sequence[OctavoEncoderAttention], path: str, margin: float) -> None:
    """Have the scales saved once every layer has seen 16 passes."""
    names = [layer.layer_name for layer in layers]
    if "" in names or len({*names}) < len(names):
        raise UnsupportedError(
            "--mm-encoder-fp8-scale-save-path: vLLM gives the attention layers of this model no "
            "names of their own: use dynamic scales"
        )
    header = ScaleHeader(
        kind="vision_attention", model=get_current_vllm_config().model_config.model
    )
    parts = [layer.octavo for layer in layers if layer.octavo is not None]
    saver = LoggingSaver(nn.ModuleList(parts), path, margin=margin, header=header)
    saver.num_steps_left = PATIENCE * len(parts)
    for layer in layers:
        layer.saver = saver


def _longest(max_seqlen: Tensor | int | None, num_tokens: int) -> int:
    """An upper bound of the lengths; for some backends vLLM has none or says 0.

    Like vLLM's own layers, it waits for a bound on the GPU; captured models have theirs on the CPU.
    """
    given = 0 if max_seqlen is None else int(max_seqlen)
    return given or num_tokens
