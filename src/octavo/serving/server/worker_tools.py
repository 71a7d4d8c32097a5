"""What worker processes need for prompts and grammars; imports little, since they start often."""

from dataclasses import dataclass
from typing import Any

from octavo.serving.server.guidance import MakeGrammar
from octavo.serving.server.prompts import Prompts


@dataclass(frozen=True)
class WorkerTools:
    """What tasks in a worker process use."""

    prompts: Prompts
    make_grammar: MakeGrammar


@dataclass(frozen=True)
class WorkerSetUp:
    """Makes the tools of a worker process from what pickle can take there."""

    tokenizer: Any
    max_context: int
    make_grammar: MakeGrammar

    def __call__(self) -> WorkerTools:
        return WorkerTools(Prompts(self.tokenizer, self.max_context), self.make_grammar)


def call_prompts(tools: WorkerTools, method: str, args: Any, kwargs: Any) -> Any:
    """Call a method of `Prompts` in a worker process."""
    return getattr(tools.prompts, method)(*args, **kwargs)
