"""The attention backend OCTAVO: what it can do, and the metadata of each step."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from octavo.errors import UnsupportedError
from octavo.integrations.vllm.attention import OctavoAttention
from octavo.integrations.vllm.batch import Batch, Requests, count_decodes
from octavo.integrations.vllm.names import BACKEND, LOGGER, warn_on_gpu
from octavo.integrations.vllm.plugin import backend_member
from octavo.ops.plan_decode import MAX_QUERY_TOKENS

MAX_HEAD_SIZE = 256
# octavo's kernels are made for pages of 64 tokens.
PAGE_SIZE = 64


class OctavoBackend(AttentionBackend):
    """Attention by octavo's ops, on NVIDIA GPUs."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
    ]

    @staticmethod
    def get_name() -> str:
        """The backend's name on the command line."""
        name: str = backend_member().name
        return name

    @staticmethod
    def get_impl_cls() -> type[OctavoAttention]:
        """What runs a layer's attention."""
        return OctavoAttention

    @staticmethod
    def get_builder_cls() -> type["BatchBuilder"]:
        """What makes the metadata of a step."""
        return BatchBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """The page sizes of octavo's fastest kernels."""
        return [16, 32, 64, 128]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The page size where the user has chosen none."""
        return PAGE_SIZE

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Any layout, that of octavo's own cache first: ops take pages of any strides."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        first = KVCacheLayout.LBHNC
        return first, *(layout for layout in KVCacheLayout if layout is not first)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """The shape of a layer's pages, contiguous as in LBHNC: vLLM 0.26 asks for it."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """What vLLM 0.26 calls that layout."""
        return "HND"

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether kernels take heads of this size."""
        return 32 <= head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes: every op has a window."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes: one logit for each head."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Yes: one scale for each KV head."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: batches are split by the query lengths that the CPU knows."""
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether kernels run on such a GPU."""
        return bool(current_platform.is_cuda() and capability.to_int() >= 80)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why an FP8 cache cannot be on such a GPU; None if it can."""
        is_fp8 = kv_cache_dtype is not None and kv_cache_dtype.startswith("fp8")
        if is_fp8 and device_capability.to_int() < 89:
            return "an FP8 KV cache needs compute capability 8.9 or newer"
        return None


def is_asked_for() -> bool:
    """Whether the engine that is being made was started with --attention-backend OCTAVO."""
    config = get_current_vllm_config().attention_config
    octavo = backend_member()
    if octavo in config.backend_per_kind.values():
        raise UnsupportedError(
            f"backend_per_kind: on a CPU {octavo.name} runs all layers or none: use "
            f"--attention-backend {octavo.name}"
        )
    return bool(config.backend is octavo)


class CpuBackend(CPUAttentionBackend):
    """vLLM's backend for CPUs, or octavo's reference ops for engines that asked for OCTAVO."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """What runs a layer's attention."""
        return OctavoAttention if is_asked_for() else CPUAttentionBackend.get_impl_cls()

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """What makes the metadata of a step."""
        return BatchBuilder if is_asked_for() else CPUAttentionBackend.get_builder_cls()

    @classmethod
    def supports_sink(cls) -> bool:
        """Both take sinks."""
        return True


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Splits each step's batch into decoding and prompts.

    A CUDA graph of decoding alone needs no more than `build`: layers read vLLM's own tensors, which
    stay where they are, and the first layer makes the plan, on the device and as a part of the
    graph. Padded requests have the length 0, for which kernels write zeros.
    """

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Graphs of requests that decode equally many tokens, if one call decodes so many."""
        if 1 + _num_drafted(vllm_config) <= MAX_QUERY_TOKENS:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Requests with so few query tokens come first in every batch.
        self.reorder_batch_threshold = min(1 + _num_drafted(vllm_config), MAX_QUERY_TOKENS)
        warn_on_gpu()
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        is_fp8 = any(layer.impl.is_fp8 for layer in layers)
        init_logger(LOGGER).info(
            "octavo runs attention in %d layers, over a KV cache in %s",
            len(layer_names),
            "FP8 (e4m3)" if is_fp8 else "the model's dtype",
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Batch:
        """The batch of a step; common_prefix_len is always 0."""
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError(f"{BACKEND}: expected causal attention, got causal=False")
        starts = common.query_start_loc_cpu.tolist()
        query_lens = [end - start for start, end in zip(starts, starts[1:], strict=False)]
        while query_lens and query_lens[-1] == 0:  # padding
            query_lens.pop()
        num_decodes, _ = count_decodes(query_lens)
        decodes = prompts = cu_seqlens = None
        if num_decodes:
            decodes = _requests(common, slice(num_decodes), starts, query_lens)
        if num_decodes < len(query_lens):
            rows = slice(num_decodes, len(query_lens))
            prompts = _requests(common, rows, starts, query_lens)
            cu_seqlens = common.query_start_loc[rows.start : rows.stop + 1]
            cu_seqlens = cu_seqlens - cu_seqlens[0]
        return Batch(decodes, prompts, cu_seqlens)


def _num_drafted(vllm_config: Any) -> int:
    """The most tokens that are speculated on for a request in a step."""
    speculative = vllm_config.speculative_config
    return (speculative and speculative.num_speculative_tokens) or 0


def _requests(
    common: Any, rows: slice, starts: Sequence[int], query_lens: Sequence[int]
) -> Requests:
    """Some rows of a batch."""
    first = rows.start or 0
    lengths: Tensor = common.seq_lens[rows]
    known = common.seq_lens_cpu_upper_bound
    num_cached = len(lengths) * common.max_seq_len if known is None else int(known[rows].sum())
    return Requests(
        page_table=common.block_table_tensor[rows],
        lengths=lengths,
        tokens=slice(starts[first], starts[rows.stop]),
        max_query_len=max(query_lens[rows]),
        num_cached_tokens=num_cached,
    )
