"""Settings of the engine: no tensors."""

from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.serving.engine.scheduler import SchedulerSettings


@dataclass(frozen=True, kw_only=True)
class EngineSettings(SchedulerSettings):
    """How much runs at once, and how much memory the cache takes.

    page_size: tokens of a page. num_pages: of the cache; None takes what memory has room for:
    memory_fraction of a GPU's, all that is in use included, or one GiB on a CPU. max_context: None
    is the model's own, or what the cache holds if that is less. seed: what the seeds of requests
    without one are drawn by. cuda_graphs: whether steps that only decode run by CUDA graphs; None
    is where they can. compile: whether torch.compile makes kernels of what lies around attention.
    """

    page_size: int = 64
    num_pages: int | None = None
    memory_fraction: float = 0.9
    seed: int = 0
    cuda_graphs: bool | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_pages is not None and self.num_pages < 1:
            raise ConfigError(f"expected num_pages of 1 or more, got {self.num_pages}")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"expected memory_fraction in (0, 1], got {self.memory_fraction}")
