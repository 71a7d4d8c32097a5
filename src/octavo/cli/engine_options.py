"""Options of commands that run a model in octavo's engine; names are those of `octavo serve`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import Flags, field_names
from octavo.integrations.transformers.encoder_options import EncoderOptions

if TYPE_CHECKING:
    from octavo.serving.engine.settings import EngineSettings

DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device", help="cuda, cuda:1, cpu; left out, a GPU if there is one.", show_default=False
    ),
]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How much an engine runs at once, how much memory it takes, and how it launches kernels.

    Attributes:
        max_num_seqs: Requests that run at once; left out, 256, or --max-num-batched-tokens if that
            is less.
        max_num_batched_tokens: Tokens of one forward pass; left out, 2048, or one for each request
            if more run at once.
        memory_fraction: Share of a GPU's memory for weights and cache.
        num_pages: Pages of the cache; left out, what the run can use and memory has room for.
        page_size: Tokens of a page.
        enforce_eager: No CUDA graphs: every kernel is launched by itself.
        compile: torch.compile the model's dense parts.
    """

    max_num_seqs: Annotated[int | None, typer.Option(min=1)] = None
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1)] = None
    memory_fraction: Annotated[float, typer.Option("--gpu-memory-utilization")] = 0.9
    num_pages: Annotated[int | None, typer.Option(min=1)] = None
    page_size: int = 64
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager")] = False
    compile: Annotated[bool, typer.Option("--compile")] = False

    @property
    def limits(self) -> dict[str, int]:
        """max_num_seqs and max_num_batched_tokens; the one that is left out fits the other."""
        return batch_limits(self.max_num_seqs, self.max_num_batched_tokens)

    def settings(self, **others: Any) -> "EngineSettings":
        """The engine's settings; others: fields that are not among these options, or replace them.

        settings(max_context=8192, enable_prefix_caching=False)
        """
        from octavo.serving.engine.settings import EngineSettings

        own = {
            **batch_limits(
                others.pop("max_num_seqs", self.max_num_seqs), self.max_num_batched_tokens
            ),
            "memory_fraction": self.memory_fraction,
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "cuda_graphs": False if self.enforce_eager else None,
            "compile": self.compile,
        }
        return EngineSettings(**{**own, **others})


def batch_limits(num_seqs: int | None, num_tokens: int | None) -> dict[str, int]:
    """max_num_seqs and max_num_batched_tokens; the one that is left out fits the other."""
    from octavo.serving.engine.scheduler import SchedulerSettings as Default

    return {
        "max_num_seqs": num_seqs or min(Default.max_num_seqs, num_tokens or Default.max_num_seqs),
        "max_num_batched_tokens": num_tokens or max(Default.max_num_batched_tokens, num_seqs or 0),
    }


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """The model that a benchmark runs: a checkpoint, or random weights of known sizes.

    Attributes:
        config: Sizes of a model with random weights, the same for all rows: llama-3.1-8b (the
            default on a GPU), gpt-oss-like (24 layers, 64 heads over 8, head_dim 64, sinks, a
            window of 128 in every other layer; one dense MLP as large as the experts that a token
            sees), tiny (the default on a CPU) or tiny-gpt-oss.
        layers: Only so many layers; with --config.
        dtype: Of the weights: auto (the checkpoint's; bfloat16 with --config), bfloat16, float16
            or float32.
        device: cuda, cuda:1, cpu; left out, a GPU if there is one.
    """

    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder, GGUF file or hub name; or --config for random weights.",
            show_default=False,
        ),
    ] = None
    config: str | None = None
    layers: Annotated[int | None, typer.Option(min=1)] = None
    dtype: str = "auto"
    device: str | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether it is to run on a GPU."""
        return str(self.device).startswith("cuda")

    def chosen(self) -> "SubjectOptions":
        """The same with a device, and sizes that suit it where no model was asked for."""
        from octavo.integrations.transformers.load import choose_device

        device, config = choose_device(self.device), self.config
        if self.model is None and config is None:
            config = "llama-3.1-8b" if device.startswith("cuda") else "tiny"
        return replace(self, config=config, device=device)


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The recipes that a benchmark compares.

    Attributes:
        kv_cache_dtype: A row; may be given more than once, and is auto and fp8 if left out. The
            first is what the others are compared with. Scales of an FP8 cache are the checkpoint's,
            or, of random weights, calibrated first; auto+prefill=vllm-fa3 needs --peers.
        skip_layers: Layers whose cache is left as it is in every FP8 row (0-1, sliding_window, …);
            may be given more than once.
        peers: Folder with vLLM's FlashAttention-3 (*.abi3.so), which rows may then ask for:
            auto+prefill=vllm-fa3.
    """

    kv_cache_dtype: tuple[str, ...] = ()
    skip_layers: Annotated[tuple[str, ...], typer.Option("--kv-cache-dtype-skip-layers")] = ()
    peers: Annotated[Path | None, typer.Option(exists=True, file_okay=False)] = None

    @property
    def names(self) -> tuple[str, ...]:
        """The rows that were asked for, or auto and fp8."""
        return self.kv_cache_dtype or ("auto", "fp8")


# As vLLM spells them.
EncoderFlags = Annotated[
    EncoderOptions,
    Flags(
        names={
            name: f"--mm-encoder-{name.replace('_', '-')}" for name in field_names(EncoderOptions)
        },
        without=("graph_budgets",),
    ),
]
