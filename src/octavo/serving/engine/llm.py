"""octavo.LLM: answers to a list of prompts."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

from octavo.errors import ConfigError, OctavoError
from octavo.integrations.transformers.tokenizer import PromptSettings, chat_tokens, text_tokens
from octavo.recipe import Recipe
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.request import Completion, Delta, Request, Sampling, gather
from octavo.serving.engine.settings import EngineSettings

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A language model that answers many prompts at once.

    model: a folder, GGUF file or hub name, a model of transformers, "chart-reader", or None for
    SmolLM2-135M-Instruct. A checkpoint in FP8 runs in FP8, with its own scales. recipe: what is
    quantized; its kv_cache and vision_attention, which vision_impl runs. tokenizer,
    image_processor: for a model that is loaded already; a model by name brings its own. add_bos:
    whether prompts start with BOS; None follows the tokenizer, and warns where that looks wrong.
    chat_template: a Jinja template or its file, in place of the model's own. engine: the step API
    below, for streaming and cancellation.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        recipe: Recipe | None = None,
        settings: EngineSettings = EngineSettings(),
        tokenizer: Any = None,
        image_processor: Any = None,
        dtype: str = "auto",
        device: str | None = None,
        vision_impl: str | None = None,
        add_bos: bool | None = None,
        chat_template: str | Path | None = None,
    ) -> None:
        self.engine = load_engine(
            model,
            recipe,
            settings,
            tokenizer=tokenizer,
            image_processor=image_processor,
            dtype=dtype,
            device=device,
            vision_impl=vision_impl,
            prompts=PromptSettings(add_bos=add_bos, chat_template=chat_template),
        )
        self._num_requests = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = Sampling(),
        *,
        show_progress: bool = False,
    ) -> list[Completion]:
        """The answers in the order of their prompts.

        A prompt is a text, tokens, or {"prompt": …, "images": […]}: there it is a text or tokens
        with one image token for each of the pillow images, or messages for the chat template, with
        a part {"type": "image"} for each.
        sampling: one for all, or one for each. A prompt that can never run raises before any runs,
        and one that fails raises; all others are then aborted.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        if isinstance(prompts, str):
            raise ConfigError("expected a list of prompts, got one text: put it in a list")
        requests = self._requests(prompts, sampling)
        stats = self.engine.stats()
        if stats.num_running or stats.num_waiting:
            raise ConfigError("expected an engine without open requests, got some: step it first")
        deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
        num_tokens = 0
        text = "{task.description}, {task.fields[num_tokens]} tokens"
        try:
            bar = Progress(text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with bar if show_progress else nullcontext():
                task = bar.add_task("answers", total=len(requests), num_tokens=0)
                for delta in self._run(requests):
                    if delta.request_id not in deltas:
                        continue  # the end of one that an earlier call gave up
                    if delta.finish_reason == "error":
                        raise OctavoError(f"request {delta.request_id} failed: {delta.error}")
                    deltas[delta.request_id].append(delta)
                    num_tokens += len(delta.tokens)
                    is_done = delta.finish_reason is not None
                    bar.update(task, advance=is_done, num_tokens=num_tokens)
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        return [gather(found) for found in deltas.values()]

    def close(self) -> None:
        """Free the cache, and give a model that was loaded already back as it was."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling]
    ) -> list[Request]:
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(each) != len(prompts):
            raise ConfigError(
                f"expected one sampling, or one for each of {len(prompts)} prompts, got {len(each)}"
            )
        requests = []
        for prompt, own in zip(prompts, each, strict=True):
            name = f"llm-{self._num_requests}"
            self._num_requests += 1
            found: Any = prompt
            images: Sequence[Any] = ()
            if isinstance(prompt, Mapping):
                if unknown := sorted(map(str, prompt.keys() - {"prompt", "images"})):
                    message = f"expected a prompt with images, got {', '.join(unknown)} in it, too"
                    raise ConfigError(message)
                if "prompt" not in prompt:
                    raise ConfigError('expected {"prompt": …, "images": […]}, got no prompt')
                found, images = prompt["prompt"], prompt.get("images", ())
            tokens = self._tokens(found)
            request = Request(request_id=name, prompt=tokens, sampling=own, images=images)
            requests.append(self.engine.check(request))
        return requests

    def _tokens(self, prompt: Any) -> tuple[int, ...]:
        """The tokens of a text, of tokens or of messages."""
        is_text = isinstance(prompt, str)
        if not is_text and not any(isinstance(message, Mapping) for message in prompt):
            return tuple(prompt)
        if self.engine.tokenizer is None:
            raise ConfigError("expected prompts of tokens, got a text and no tokenizer for it")
        return (text_tokens if is_text else chat_tokens)(self.engine.tokenizer, prompt)

    def _run(self, requests: list[Request]) -> Iterator[Delta]:
        """What the engine has to say until all have ended; the queue is never full."""
        waiting = deque(requests)
        while waiting or self.engine.has_work:
            while waiting and self.engine.stats().num_waiting < self.engine.settings.max_queue:
                self.engine.add(waiting.popleft())
            yield from self.engine.step()
