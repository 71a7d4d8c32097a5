"""How a vision encoder attends: vLLM's `--mm-encoder-…` options; torch is imported on use."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from torch import nn

    from octavo.integrations.changes import Changes

VLLM_BACKEND = "FLASHINFER"  # the one that vLLM's guide to FP8 attention of encoders asks for


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """How the vision encoder attends; the names are those of vLLM's `--mm-encoder-…` options.

    Attributes:
        attn_dtype: fp8; left out, as the model is.
        attn_backend: Implementation of FP8 attention, one of octavo's: gluon, triton, reference or
            a registered one; left out, the fastest that can run (octavo doctor says which).
            vLLM's FLASHINFER is accepted, and octavo's own runs.
        fp8_scale_path: Static scales from this file.
        fp8_scale_save_path: Save the dynamic scales here, once every layer has seen 16 passes.
        fp8_scale_save_margin: Times the scales that are saved; 1.5 if left out.
        graph_budgets: Tokens of the CUDA graphs that it runs by; none runs it eagerly.
    """

    attn_dtype: str | None = None
    attn_backend: str | None = None
    fp8_scale_path: Path | None = None
    fp8_scale_save_path: Path | None = None
    fp8_scale_save_margin: float | None = None
    graph_budgets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        dtype, margin = self.attn_dtype, self.fp8_scale_save_margin
        load, save = self.fp8_scale_path, self.fp8_scale_save_path
        if dtype not in (None, "fp8"):
            raise ConfigError(f"expected an encoder attention dtype of fp8, got {dtype!r}")
        if (load, save, margin) != (None, None, None):
            from octavo.calibration.autosave import check_scale_paths

            check_scale_paths(
                is_fp8=dtype == "fp8", scale_path=load, save_path=save, margin=self.margin
            )
        if margin is not None and save is None:
            raise ConfigError(
                f"expected a path to save scales to with the margin {margin:g}, got none"
            )
        if (backend := self.attn_backend) is None:
            return
        from octavo.ops.select import impl_names

        if dtype is None:
            raise ConfigError(
                f"a backend is chosen for attention in fp8: expected that dtype for {backend!r}, "
                "got none"
            )
        if backend not in (*(names := impl_names("attention")), VLLM_BACKEND):
            # vLLM spells its names in capitals: FLASH_ATTN, TORCH_SDPA, …
            whose = ", a name of vLLM's" if backend.isupper() else ""
            raise ConfigError(
                f"expected a backend of octavo's, one of {', '.join(names)}, or vLLM's "
                f"{VLLM_BACKEND}; got {backend!r}{whose}"
            )

    @property
    def impl(self) -> str | None:
        """The implementation of attention that was asked for; None chooses the fastest."""
        return None if self.attn_backend == VLLM_BACKEND else self.attn_backend

    @property
    def note(self) -> str | None:
        """What runs in place of vLLM's backend, if that was asked for."""
        if self.attn_backend != VLLM_BACKEND:
            return None
        return (
            f"octavo has no {VLLM_BACKEND} backend and runs its own FP8 attention instead, the "
            "fastest implementation that can run here"
        )

    @property
    def margin(self) -> float:
        """What scales are multiplied by before they are saved."""
        return 1.5 if self.fp8_scale_save_margin is None else self.fp8_scale_save_margin

    def apply(self, model: "nn.Module") -> "Changes | None":
        """Do it to a model, in place; one that cannot run like this stays as it was."""
        from octavo.integrations.apply import restore_
        from octavo.integrations.apply_model import apply_vision_
        from octavo.integrations.transformers.vision_graphs import use_graphs_
        from octavo.recipe import Recipe

        changes, path = None, self.fp8_scale_path
        if self.attn_dtype is not None:
            recipe = Recipe(vision_attention="fp8")
            if path is not None:
                recipe = Recipe(vision_attention={"scaling": "static"}, scales=str(path))
            changes = apply_vision_(model, recipe, vision_impl=self.impl)
        if self.graph_budgets:
            try:
                use_graphs_(model, self.graph_budgets)
            except OctavoError:
                if changes is not None:
                    restore_(model)
                raise
        return changes
