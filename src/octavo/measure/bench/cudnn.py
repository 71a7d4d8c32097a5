"""cuDNN's FP8 attention as a graph of its frontend: a dense batch, or packed sequences."""

from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.numerics.attention import Packing
from octavo.numerics.quantize import Quantized

ONE = [1, 1, 1, 1]


class Fp8Graph:
    """One built sdpa_fp8 graph and the tensors it runs on.

    cudnn: the frontend's module. parts: q, k and v, contiguous, [batch, length, heads, head_dim],
    or packed [tokens, heads, head_dim] with `packing`. The result has q's layout, and the scale of
    the values: it is a mean of them.
    """

    def __init__(
        self,
        cudnn: Any,
        parts: tuple[Quantized, Quantized, Quantized],
        softmax_scale: float,
        is_causal: bool,
        packing: Packing | None = None,
    ) -> None:
        self.cudnn, self.kinds, self.packing = cudnn, cudnn.data_type, packing
        self.handle = cudnn.create_handle()
        self.graph = cudnn.pygraph(
            io_data_type=self.kinds.FP8_E4M3,
            intermediate_data_type=self.kinds.FLOAT,
            compute_data_type=self.kinds.FLOAT,
            handle=self.handle,
        )
        self.bound: list[tuple[Any, Tensor]] = []  # the graph's tensors and ours
        q, k, v = (self._operand(part.data) for part in parts)
        out, _, amax_s, amax_o = self.graph.sdpa_fp8(
            q=q,
            k=k,
            v=v,
            **self._factors(parts),
            **self._mask(is_causal),
            generate_stats=False,
            attn_scale=softmax_scale,
        )
        self.out = torch.empty_like(parts[0].data)
        self._write(out, self.out, *self._layout(self.out), self.kinds.FP8_E4M3)
        if packing is not None:
            out.set_ragged_offset(self._offsets(self.out, packing))
        for largest in (amax_s, amax_o):  # of P and of the result, which nobody reads
            self._write(largest, torch.ones_like(parts[0].scale), ONE, ONE, self.kinds.FLOAT)
        self._build()
        self.pack = dict(self.bound)  # not before: building names the tensors
        size = max(1, self.graph.get_workspace_size())
        self.workspace = self.out.new_empty(size, dtype=torch.uint8)

    def run(self) -> Tensor:
        """The result in FP8, in the same memory every time."""
        self.cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
        self.graph.execute(self.pack, self.workspace, handle=self.handle)
        return self.out

    def _operand(self, x: Tensor) -> Any:
        dim, stride = self._layout(x)
        operand = self._read(x, self.kinds.FP8_E4M3, dim, stride)
        if self.packing is not None:
            operand.set_ragged_offset(self._offsets(x, self.packing))
        return operand

    def _layout(self, x: Tensor) -> tuple[list[int], list[int]]:
        """Sizes and strides of x, heads before tokens; of packed x, as if all were the longest."""
        num_heads, head_dim = x.shape[-2:]
        num_sequences, length = x.shape[:2]
        if self.packing is not None:
            num_sequences, length = len(self.packing.cu_seqlens_q) - 1, self.packing.max_seqlen_q
        row = num_heads * head_dim
        return [num_sequences, num_heads, length, head_dim], [length * row, head_dim, row, 1]

    def _offsets(self, x: Tensor, packing: Packing) -> Any:
        """Where each sequence of packed x starts, in values."""
        starts = packing.cu_seqlens_q.long() * x.shape[1] * x.shape[2]
        return self._read_column(starts, self.kinds.INT64)

    def _factors(self, parts: tuple[Quantized, Quantized, Quantized]) -> dict[str, Any]:
        """The scales as cuDNN names them: a descale multiplies, a scale is a reciprocal."""
        q, k, v = (part.scale for part in parts)
        weight = torch.full_like(v, 448.0)  # P ≤ 1 fills e4m3
        values = {"descale_q": q, "descale_k": k, "descale_v": v}
        values |= {"descale_s": 1 / weight, "scale_s": weight, "scale_o": 1 / v}
        return {name: self._read_column(x, self.kinds.FLOAT) for name, x in values.items()}

    def _mask(self, is_causal: bool) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if is_causal:
            options["diagonal_alignment"] = self.cudnn.diagonal_alignment.TOP_LEFT
            options["right_bound"] = 0
        if self.packing is not None:
            lengths = self.packing.cu_seqlens_q.diff()
            options["use_padding_mask"] = True
            for name in ("seq_len_q", "seq_len_kv"):
                options[name] = self._read_column(lengths, self.kinds.INT32)
        return options

    def _read_column(self, x: Tensor, kind: Any) -> Any:
        """An input [n, 1, 1, 1]: scales, lengths and offsets."""
        column = x.reshape(-1, 1, 1, 1).contiguous()
        return self._read(column, kind, [*column.shape], ONE)

    def _read(self, x: Tensor, kind: Any, dim: list[int], stride: list[int]) -> Any:
        tensor = self.graph.tensor(dim=dim, stride=stride, data_type=kind)
        self.bound.append((tensor, x))
        return tensor

    def _write(self, tensor: Any, x: Tensor, dim: list[int], stride: list[int], kind: Any) -> None:
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)
        self.bound.append((tensor, x))

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
