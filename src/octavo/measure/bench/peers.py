"""Other libraries' kernels, called as ours are: to be measured beside, never to run a model.

A peer is installed, or in a folder with its library (`*.abi3.so`, or that as .xz) or its package.
Each one takes Inputs in BF16, and returns a call that gives the result in the layout of q.
"""

import ctypes
import importlib.util
import lzma
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.atomic import temporary_path
from octavo.cache.view import PagedView
from octavo.errors import UnsupportedError
from octavo.numerics.attention import Packing
from octavo.numerics.granularity import PerTensor
from octavo.numerics.quantize import Quantized, quantize

Call = Callable[[], Tensor]
Three = tuple[Tensor, Tensor, Tensor]
Scales = Three | tuple[None, None, None]
# Namespace in torch.ops -> (package that ships it, end of the library's file name).
LIBRARIES = {
    "_vllm_fa3_C": ("vllm", "vllm_fa3_C.abi3.so"),
    "fa3_fwd": ("fa3_fwd", "fa3_fwd_C.abi3.so"),
}


@dataclass(frozen=True)
class Inputs:
    """What attention is computed of.

    qkv: each [batch, length, heads, head_dim], or packed [tokens, heads, head_dim] with `packing`.
    out: where FlashAttention-3 puts the result of packed sequences, like q; rows of no sequence
    stay as they are there.
    """

    qkv: Three
    packing: Packing | None = None
    is_causal: bool = False
    out: Tensor | None = None

    @property
    def softmax_scale(self) -> float:
        """That of all peers: 1/√head_dim."""
        return float(self.qkv[0].shape[-1] ** -0.5)


@cache
def load(namespace: str, folder: Path | None) -> Any:
    """torch.ops.<namespace>, from `folder` or the installed package."""
    package, ending = LIBRARIES[namespace]
    roots = [folder] if folder is not None else []
    spec = importlib.util.find_spec(package)
    if spec is not None:
        roots += map(Path, spec.submodule_search_locations or [])
    for root in roots:
        for path in sorted(root.rglob(f"*{ending}")) or _unpacked(root, ending):
            torch.ops.load_library(str(path))
            return getattr(torch.ops, namespace)
    raise UnsupportedError(f"{package} is not installed")


def _unpacked(root: Path, ending: str) -> list[Path]:
    found = []
    for packed in sorted(root.rglob(f"*{ending}.xz")):
        path = packed.with_suffix("")
        # Renamed when whole: other processes may be looking for it.
        with temporary_path(path.parent, is_folder=True) as folder:
            with lzma.open(packed) as source, open(folder / path.name, "wb") as target:
                shutil.copyfileobj(source, target)
            os.replace(folder / path.name, path)
        found.append(path)
    return found


def sdpa(backend: SDPBackend, inputs: Inputs) -> Call:
    """torch's scaled_dot_product_attention with one of its backends, of a dense batch."""
    q, k, v = (x.transpose(1, 2) for x in inputs.qkv)
    options: Any = {"is_causal": inputs.is_causal, "enable_gqa": True}

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    try:
        call()
    except RuntimeError as error:
        raise UnsupportedError(str(error).splitlines()[0]) from error
    return call


def fa3_fwd(folder: Path | None, fp8: bool, inputs: Inputs) -> Call:
    """FlashAttention-3 of the fa3-fwd package: FP8 with one level; dense without `packing`."""
    library = load("fa3_fwd", folder)
    options: Any = {"is_causal": inputs.is_causal, "softmax_scale": inputs.softmax_scale}
    if inputs.packing is not None:
        options |= vars(inputs.packing)

    def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scales: Scales) -> None:
        named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
        library.fwd(q, k, v, out=out, **options, **named, num_splits=1)

    return _over_operands(run, fp8, inputs)


def vllm_fa3(folder: Path | None, fp8: bool, inputs: Inputs) -> Call:
    """vLLM's FlashAttention-3: FP8 with two levels. A dense batch is packed sequences to it."""
    if inputs.packing is None:
        q, k, v = inputs.qkv
        batch, length = q.shape[:2]
        if k.shape[1] != length:
            raise UnsupportedError("called with as many queries as keys only")
        ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
        flat = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        packing = Packing.same(ends, length)
        packed = vllm_fa3(folder, fp8, replace(inputs, qkv=flat, packing=packing))
        return lambda: packed().unflatten(0, (batch, length))
    options: Any = {"is_causal": inputs.is_causal, "softmax_scale": inputs.softmax_scale}
    run = partial(vllm_fwd, load("_vllm_fa3_C", folder), **options, **vars(inputs.packing))
    return _over_operands(run, fp8, inputs)


def _over_operands(
    run: Callable[[Tensor, Tensor, Tensor, Tensor, Scales], None], fp8: bool, inputs: Inputs
) -> Call:
    """A call that has `run` write the result, given operands as FlashAttention takes them."""
    (q, k, v), scales = _operands(fp8, inputs)
    head_dim, out = inputs.qkv[0].shape[-1], inputs.out
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)

    def call() -> Tensor:
        run(q, k, v, out, scales)
        return out[..., :head_dim]

    return call


def cudnn_fp8(folder: Path | None, inputs: Inputs) -> Callable[[], Quantized]:
    """cuDNN's FP8 attention through its own frontend; on Hopper its result is FP8, too.

    head_dim is padded to a power of two: 72 is faster as 128 than as 80.
    """
    cudnn, head_dim = load_cudnn(folder), inputs.qkv[0].shape[-1]
    padding = (0, (1 << (head_dim - 1).bit_length()) - head_dim)
    parts = [quantize(F.pad(x, padding).contiguous(), PerTensor()) for x in inputs.qkv]
    graph = CudnnGraph(cudnn, parts, inputs)
    return lambda: Quantized(graph.run()[..., :head_dim], parts[2].scale, PerTensor())


class CudnnGraph:
    """cuDNN's FP8 attention: one built sdpa_fp8 graph of its frontend, and the tensors it runs on.

    cudnn: the frontend's module. parts: q, k and v of the inputs, contiguous. The result has q's
    layout, and the scale of the values: it is a mean of them.
    """

    def __init__(self, cudnn: Any, parts: Sequence[Quantized], inputs: Inputs) -> None:
        self.cudnn, self.kinds, self.packing = cudnn, cudnn.data_type, inputs.packing
        self.handle = cudnn.create_handle()
        self.graph = cudnn.pygraph(
            io_data_type=self.kinds.FP8_E4M3,
            intermediate_data_type=self.kinds.FLOAT,
            compute_data_type=self.kinds.FLOAT,
            handle=self.handle,
        )
        self.bound: list[tuple[Any, Tensor]] = []  # the graph's tensors and ours
        q, k, v = (self._bind_rows(part.data) for part in parts)
        q_scale, k_scale, v_scale = (part.scale for part in parts)
        weight = torch.full_like(v_scale, 448.0)  # P ≤ 1 fills e4m3
        # As cuDNN names them: a descale multiplies, a scale is a reciprocal.
        factors = {"descale_q": q_scale, "descale_k": k_scale, "descale_v": v_scale}
        factors |= {"descale_s": 1 / weight, "scale_s": weight, "scale_o": 1 / v_scale}
        options = {name: self._bind(x, self.kinds.FLOAT) for name, x in factors.items()}
        if inputs.is_causal:
            options["diagonal_alignment"] = cudnn.diagonal_alignment.TOP_LEFT
            options["right_bound"] = 0
        if self.packing is not None:
            lengths = self.packing.cu_seqlens_q.diff()
            options |= {
                n: self._bind(lengths, self.kinds.INT32) for n in ("seq_len_q", "seq_len_kv")
            }
            options["use_padding_mask"] = True
        out, _, amax_s, amax_o = self.graph.sdpa_fp8(
            q=q,
            k=k,
            v=v,
            **options,
            generate_stats=False,
            attn_scale=inputs.softmax_scale,
        )
        self.out = torch.empty_like(parts[0].data)
        self._bind_rows(self.out, out)
        for largest in (amax_s, amax_o):  # of P and of the result, which nobody reads
            self._bind(torch.ones_like(v_scale), self.kinds.FLOAT, output=largest)
        self._build()
        self.pack = dict(self.bound)  # not before: building names the tensors
        size = max(1, self.graph.get_workspace_size())
        self.workspace = self.out.new_empty(size, dtype=torch.uint8)

    def run(self) -> Tensor:
        """The result in FP8, in the same memory every time."""
        self.cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
        self.graph.execute(self.pack, self.workspace, handle=self.handle)
        return self.out

    def _bind_rows(self, x: Tensor, output: Any = None) -> Any:
        """Bind q, k, v or the result: heads before tokens, packed x as if all were the longest."""
        num_heads, head_dim = x.shape[-2:]
        num_sequences, length = x.shape[:2]
        if self.packing is not None:
            num_sequences, length = len(self.packing.cu_seqlens_q) - 1, self.packing.max_seqlen_q
        row = num_heads * head_dim
        layout = [num_sequences, num_heads, length, head_dim], [length * row, head_dim, row, 1]
        tensor = self._bind(x, self.kinds.FP8_E4M3, layout, output)
        if self.packing is not None:  # where each sequence starts, in values
            starts = self.packing.cu_seqlens_q.long() * row
            tensor.set_ragged_offset(self._bind(starts, self.kinds.INT64))
        return tensor

    def _bind(
        self,
        x: Tensor,
        kind: Any,
        layout: tuple[list[int], list[int]] | None = None,
        output: Any = None,
    ) -> Any:
        """The graph's tensor whose memory is x: a new input, or this output of the graph.

        layout: sizes and strides; None is a column [n, 1, 1, 1] of scales, lengths or offsets.
        """
        if layout is None:
            x = x.reshape(-1, 1, 1, 1).contiguous()
            layout = [*x.shape], [1, 1, 1, 1]
        dim, stride = layout
        if output is None:
            tensor = self.graph.tensor(dim=dim, stride=stride, data_type=kind)
        else:
            tensor = output.set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)
        self.bound.append((tensor, x))
        return tensor

    def _build(self) -> None:
        try:
            self.graph.validate()
            self.graph.build_operation_graph()
            modes = self.cudnn.heur_mode
            self.graph.create_execution_plans([modes.A, modes.FALLBACK])
            self.graph.check_support()
            self.graph.build_plans()
        except self.cudnn.cudnnGraphNotSupportedError as error:
            raise UnsupportedError(str(error).splitlines()[0]) from error


@cache
def load_cudnn(folder: Path | None) -> Any:
    """The module of cuDNN's frontend, from a folder `cudnn` below `folder` or as installed."""
    found = sorted(folder.rglob("cudnn/__init__.py")) if folder is not None else []
    if found:
        sys.path.insert(0, str(found[0].parents[1].resolve()))
    if torch.cuda.is_available():
        _load_cuda_libraries()
    try:
        import cudnn
    except ImportError as error:
        raise UnsupportedError(f"nvidia-cudnn-frontend is not installed: {error}") from error
    return cudnn


def _load_cuda_libraries() -> None:
    """Load torch's cuDNN and CUDA runtime for all that comes after.

    The frontend opens both by their bare names, which finds what the process has loaded already or
    what the system has, but never the ones beside torch in site-packages.
    """
    torch.zeros(1, device="cuda")
    major = str(torch.version.cuda).split(".")[0]
    for name in ("libcudnn.so.9", f"libcudart.so.{major}"):
        paths = (path for root in sys.path for path in Path(root).glob(f"nvidia/*/lib/{name}"))
        path = next(paths, None)
        if path is not None:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def vllm_paged(folder: Path | None, q: Tensor, view: PagedView) -> Call:
    """vLLM's FlashAttention-3 over pages, scheduled beforehand; with FP8 pages q is FP8 as well.

    q: [num_sequences, q_len, num_heads, head_dim], the newest tokens of each sequence.
    """
    library = load("_vllm_fa3_C", folder)
    num_sequences, q_len, num_heads, head_dim = q.shape
    heads, longest = view.num_kv_heads, view.max_pages * view.page_size
    ends = torch.arange(num_sequences + 1, dtype=torch.int32, device=q.device) * q_len
    # The arguments that are not None, by their places.
    asked: list[Any] = [None] * 23
    asked[:7] = num_sequences, q_len, longest, num_heads, heads, head_dim, head_dim
    asked[7:10] = view.dtype, view.lengths, ends
    asked[14:21] = view.page_size, 0, True, -1, -1, False, 0
    asked[22] = 0
    query = q.flatten(0, 1)
    scales: Scales = (None, None, None)
    if view.is_fp8:
        part = quantize(query, PerTensor())
        query = part.data
        scales = _spread(num_sequences, heads, part.scale, view.key_scale, view.value_scale)
    out = torch.empty(query.shape, dtype=torch.bfloat16, device=q.device)
    run = partial(
        vllm_fwd,
        library,
        query,
        *view.as_token_major(),
        out,
        scales,
        cu_seqlens_q=ends,
        lengths=view.lengths,
        page_table=view.page_table,
        max_seqlen_q=q_len,
        max_seqlen_k=longest,
        softmax_scale=head_dim**-0.5,
        is_causal=True,
        schedule=library.get_scheduler_metadata(*asked),
        num_splits=0,
    )

    def call() -> Tensor:
        run()
        return out.view_as(q)

    return call


def vllm_fwd(
    library: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    scales: Scales = (None, None, None),
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool,
    cu_seqlens_k: Tensor | None = None,
    lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    schedule: Tensor | None = None,
    num_splits: int = 1,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """The one entry of vLLM's library, with names for what octavo uses of its 37 arguments.

    window: as of an AttentionSpec that is causal. sinks: [num_heads], in q's dtype.
    """
    left, right = (-1, -1) if window is None else (window - 1, 0)
    # It takes no names. At the other places are new keys, offsets, rotary tables and the like.
    asked: list[Any] = [None] * 37
    asked[:3] = q, k, v
    asked[6:9] = out, cu_seqlens_q, cu_seqlens_k
    asked[11:15] = lengths, max_seqlen_q, max_seqlen_k, page_table
    asked[20:25] = *scales, softmax_scale, is_causal
    asked[25:31] = left, right, 0.0, True, schedule, num_splits
    asked[32:36] = 0, sinks, 1, 0
    library.fwd(*asked)


def _operands(fp8: bool, inputs: Inputs) -> tuple[Three, Scales]:
    """The tensors as FlashAttention takes them, and one scale for each sequence and KV head.

    In FP8 its head_dim is a multiple of 16: others are padded with zeros.
    """
    if not fp8:
        return inputs.qkv, (None, None, None)
    (q, k, _), packing = inputs.qkv, inputs.packing
    padding = (0, -q.shape[-1] % 16)
    q8, k8, v8 = (quantize(F.pad(x, padding), PerTensor()) for x in inputs.qkv)
    num_sequences = len(q) if packing is None else len(packing.cu_seqlens_q) - 1
    scales = _spread(num_sequences, k.shape[-2], q8.scale, k8.scale, v8.scale)
    return (q8.data, k8.data, v8.data), scales


def _spread(num_sequences: int, num_heads: int, q: Tensor, k: Tensor, v: Tensor) -> Three:
    """The scales for each sequence and KV head."""
    shape = (num_sequences, num_heads)
    q, k, v = (scale.expand(shape).contiguous() for scale in (q, k, v))
    return q, k, v
