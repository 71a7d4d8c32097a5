"""octavo.LLM: answers to a list of prompts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
            *(model, recipe, settings),
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
        if isinstance(prompts, str):
            raise ConfigError("expected a list of prompts, got one text: put it in a list")
        requests = self._requests(prompts, sampling)
        stats = self.engine.stats()
        if stats.num_running or stats.num_waiting:
            raise ConfigError("expected an engine without open requests, got some: step it first")
        for request in requests:
            self.engine.check(request)
        deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
        try:
            with _progress(len(requests), show_progress) as advance:
                for delta in self._run(requests):
                    if delta.request_id not in deltas:
                        continue  # the end of one that an earlier call gave up
                    if delta.finish_reason == "error":
                        raise OctavoError(f"request {delta.request_id} failed: {delta.error}")
                    deltas[delta.request_id].append(delta)
                    advance(int(delta.finish_reason is not None), len(delta.tokens))
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
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling],
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
            found, images = _parts(prompt)
            tokens = self._tokens(found)
            prepared = self.engine.prepare_images(tokens, images) if len(images) else None
            requests.append(
                Request(
                    request_id=name,
                    prompt=tokens if prepared is None else prepared.tokens,
                    sampling=own,
                    images=() if prepared is None else prepared,
                )
            )
        return requests

    def _tokens(self, prompt: Any) -> tuple[int, ...]:
        """The tokens of a text, of tokens or of messages."""
        is_chat = not isinstance(prompt, str) and any(isinstance(x, Mapping) for x in prompt)
        if not isinstance(prompt, str) and not is_chat:
            return tuple(prompt)
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ConfigError("expected prompts of tokens, got a text and no tokenizer for it")
        return chat_tokens(tokenizer, prompt) if is_chat else text_tokens(tokenizer, prompt)

    def _run(self, requests: list[Request]) -> Iterator[Delta]:
        """What the engine has to say until all have ended; the queue is never full."""
        waiting = iter(requests)
        room = self.engine.settings.max_queue
        is_more = True
        while is_more or self.engine.has_work:
            while is_more and self.engine.stats().num_waiting < room:
                request = next(waiting, None)
                is_more = request is not None
                if request is not None:
                    self.engine.add(request)
            yield from self.engine.step()


def _parts(prompt: Prompt) -> tuple[Any, Sequence[Any]]:
    """A prompt's text, tokens or messages, and its images."""
    if not isinstance(prompt, Mapping):
        return prompt, ()
    if unknown := sorted(map(str, prompt.keys() - {"prompt", "images"})):
        raise ConfigError(f"expected a prompt with images, got {', '.join(unknown)} in it, too")
    if "prompt" not in prompt:
        raise ConfigError('expected {"prompt": …, "images": […]}, got no prompt')
    return prompt["prompt"], prompt.get("images", ())


@contextmanager
def _progress(num_requests: int, is_shown: bool) -> Iterator[Any]:
    """How many answers and tokens there are so far, on the terminal."""
    if not is_shown:
        yield lambda num_finished, num_tokens: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    total_tokens = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as bar:
        task = bar.add_task("answers", total=num_requests)

        def advance(num_finished: int, num_tokens: int) -> None:
            nonlocal total_tokens
            total_tokens += num_tokens
            bar.update(task, advance=num_finished, description=f"answers, {total_tokens} tokens")

        yield advance
