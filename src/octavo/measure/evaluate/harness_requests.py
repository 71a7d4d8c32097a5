"""What the tasks of lm-eval are asked for. Settings alone, no torch, as in requests.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from octavo.errors import ConfigError
from octavo.measure.evaluate.requests import LanguageRequest, Names, check_least


@dataclass(frozen=True, kw_only=True)
class TasksRequest(LanguageRequest):
    """Tasks of lm-eval, run in this process. model: None is SmolLM2-135M-Instruct.

    Attributes:
        tasks: Tasks, groups or tags of lm-eval, or YAML files of tasks, with commas between: such
            as arc_easy,gsm8k.
        include_path: A folder with more tasks, as YAML files.
        num_fewshot: Examples before each question; left out, the task's own number.
        num_questions: The first so many of each task; left out, all.
        apply_chat_template: Ask by the model's chat template; left out, prompts are plain texts.
        max_concurrency: Answers that are generated at once.
        gpu_memory_utilization: Share of a GPU's memory for weights and cache, where answers are
            generated.
    """

    task = "tasks"
    unsaid: ClassVar[Names] = ("max_concurrency", "gpu_memory_utilization")

    chunk: int | None = 2048
    tasks: str = ""
    include_path: Path | None = None
    num_fewshot: int | None = None
    num_questions: int | None = None
    apply_chat_template: bool = False
    max_concurrency: int = 16
    gpu_memory_utilization: float = 0.9

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("expected tasks of lm-eval, got none: --tasks arc_easy,gsm8k")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"expected different tasks, got {self.tasks}")
        if self.prompts.chat_template is not None and not self.apply_chat_template:
            raise ConfigError("--chat-template is for --apply-chat-template, which is missing")
        check_least(self, num_fewshot=0, num_questions=1, chunk=5, max_concurrency=1)
        super().__post_init__()

    @property
    def names(self) -> list[str]:
        """The tasks, one by one."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]
