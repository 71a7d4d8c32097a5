"""One model, kept, in engines of one recipe after the other: what benchmarks of the engine share.

Scales of FP8 caches come from the checkpoint; for random weights they are calibrated here, on
random tokens.

Before an engine is timed, one like it is checked. It answers short prompts greedily, and its
log-probabilities are compared with those that the stock model gives the same tokens: where two
logits are close, BF16 may choose another token, and all later ones with it, which is no error. In
float32 nothing is close enough for that: there, a cache that is not quantized must give the tokens
of `model.generate()`. Linear layers in FP8 are part of the model that an engine is compared with,
and each is compared with the plain one on the same input.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from octavo.calibration.observers import CalibrationSettings
from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.integrations.transformers.calibrate import calibrate_kv
from octavo.integrations.transformers.decoder import about_decoder, make_decoder
from octavo.integrations.transformers.engine_model import max_context
from octavo.integrations.transformers.text_model import load_text_model
from octavo.layers.linear import Fp8Linear
from octavo.measure.bench.expect import expect, expect_within
from octavo.measure.bench.requests import Prompt, RequestTimes
from octavo.measure.records import Scalar
from octavo.measure.rows import ENGINE, Row, parse_rows
from octavo.numerics.error import relative_rms
from octavo.recipe import Recipe
from octavo.serving.engine.engine import Engine, load_engine
from octavo.serving.engine.request import MAX_LOGPROBS, Completion, Delta, Request, Sampling, gather
from octavo.serving.engine.settings import EngineSettings

# Random tokens that scales are calibrated on, where the weights are random as well.
CALIBRATION_LEN = 1024


@dataclass(frozen=True)
class Subject:
    """The model that all rows run, and what records say of it."""

    model: Any
    about: Mapping[str, Scalar]
    is_random: bool

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(iter(self.model.parameters())).device  # type: ignore[no-any-return]

    @property
    def max_context(self) -> int | None:
        """How many tokens the model was made for; None if its config does not say."""
        return max_context(self.model, self.model.config.get_text_config())

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return int(self.model.config.get_text_config().vocab_size)


def open_subject(
    name: str | None, config: str | None, *, dtype: str, device: str, layers: int | None
) -> Subject:
    """A model by folder or hub name, or one of random weights by the name of its sizes."""
    expect((name is None) != (config is None), "a model or a config", f"{name} and {config}")
    if config is None:
        if layers is not None:
            raise ConfigError("a number of layers is for random weights: leave it out, or --config")
        loaded = load_text_model(name, dtype=dtype, device=device, prompts=None)
        shown, model, more = loaded.name, loaded.model, {}
    else:
        own = "bfloat16" if dtype == "auto" else dtype
        is_known = own in ("bfloat16", "float16", "float32")
        expect(is_known, "auto, bfloat16, float16 or float32", repr(dtype))
        model = make_decoder(config, torch.device(device), layers, getattr(torch, own))
        shown, more = config, about_decoder(model)
    own_dtype = str(model.dtype).removeprefix("torch.")
    about = {"model": shown, "dtype": own_dtype, "weight_bytes": weight_bytes(model), **more}
    return Subject(model, about, is_random=config is not None)


def weight_bytes(model: Any) -> int:
    """What a step reads of the weights; of an embedding, that is a row at most."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding
    total = sum(p.nbytes for p in model.parameters()) - (0 if is_tied else embedding.nbytes)
    fp8 = [part for part in model.modules() if isinstance(part, Fp8Linear)]
    return int(total + sum(part.weight.nbytes + part.weight_scale.nbytes for part in fp8))


def check_rows(names: Sequence[str], skip_layers: Sequence[str] = ()) -> list[Row]:
    """The rows of these names, without scales; ConfigError for others, before a model is loaded.

    skip_layers: of every row in FP8, beside its own.
    """
    rows = parse_rows(names, ENGINE)
    if skip_layers and all(row.kv_cache is None for row in rows):
        raise ConfigError("layers to skip are for rows in FP8, got none: --kv-cache-dtype fp8")
    return [row.skipping(skip_layers) for row in rows]


def make_rows(
    names: Sequence[str], subject: Subject, *, skip_layers: Sequence[str] = ()
) -> list[Row]:
    """The rows of these names, with scales for this model where it has random weights."""
    rows = check_rows(names, skip_layers)
    needing = [
        row
        for row in rows
        if row.needs_scales or (row.kv_cache and row.kv_cache.scaling == "checkpoint")
    ]
    if not subject.is_random or not needing:
        return rows
    # Random tokens are what random weights get to see here.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, subject.vocab_size, (1, CALIBRATION_LEN), generator=generator)
    settings = CalibrationSettings(granularity="head", margin=1.5)
    scales = calibrate_kv(subject.model, [{"input_ids": ids.to(subject.device)}], settings)
    found = []
    for row in rows:
        static = {**dict(row.kv_cache or {}), "scaling": "static"}
        fields = {**row.fields, "kv_cache": static, "scales": scales.to_dict()}
        found.append(replace(row, fields=fields) if row in needing else row)
    return found


def row_about(row: Row) -> Mapping[str, Scalar]:
    """What records say of a row."""
    settings = row.kv_cache
    linear = None if row.linear is None else str(row.linear)
    found = {"linear": linear, "prefill_impl": row.prefill_impl, "recipe_digest": row.digest}
    found["kv_cache_dtype"] = "auto" if settings is None else f"fp8_{settings.format}"
    if settings is not None:
        found |= {"granularity": settings.granularity, "scaling": settings.scaling}
        found["skip_layers"] = ",".join(row.fields.get("skip_layers", ())) or None
    return {"row": row.name} | {name: one for name, one in found.items() if one is not None}


@contextmanager
def open_engine(subject: Subject, row: Row, settings: EngineSettings) -> Iterator[Engine]:
    """An engine that has the model for this row; afterwards its memory is free for the next."""
    recipe = row.recipe() or Recipe()
    engine = load_engine(subject.model, recipe, settings, prefill_impl=row.prefill_impl)
    try:
        yield engine
    finally:
        engine.close()
        while engine.has_work:  # the last words of requests that were open
            engine.step()
        del engine
        gc.collect()
        if subject.device.type == "cuda":
            torch.cuda.empty_cache()


def engine_about(engine: Engine) -> dict[str, Scalar]:
    """What a record says of an engine."""
    settings = engine.settings
    names = ("page_size", "max_num_batched_tokens", "compile")
    about: dict[str, Scalar] = {name: getattr(settings, name) for name in names}
    about["cuda_graphs"] = engine.has_graphs  # what runs, not what was asked for
    about["weight_bytes"] = weight_bytes(engine.model)
    about["cache_bytes"] = sum(part.num_bytes for part in engine.precision.cache)
    return {**about, "num_pages": engine.stats().num_pages}


# Tokens of an answer before the clock starts: enough for every kernel of a step to have run.
WARM_UP_LEN = 8


def shortened(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts with short answers, to warm up with."""
    return [replace(one, output_len=min(WARM_UP_LEN, one.output_len)) for one in prompts]


def serve_prompts(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    max_concurrency: int | None = None,
    on_token: Callable[[], None] = lambda: None,
) -> tuple[list[RequestTimes], float]:
    """Serve requests in this process, without HTTP: their times, and the seconds of them all.

    max_concurrency: how many are open at most; the next one comes when one has ended. None: all at
    once. Greedy, and an answer has as many tokens as was asked for, whatever they are. A request
    that can never run raises.
    """
    limit = min(max_concurrency or len(prompts), engine.settings.max_queue)
    requests: dict[str, Request] = {}
    for index, one in enumerate(prompts):
        sampling = Sampling(temperature=0, ignore_eos=True, max_tokens=one.output_len)
        request = Request(request_id=f"bench-{index}", prompt=one.tokens, sampling=sampling)
        requests[request.request_id] = engine.check(request)
    waiting = list(reversed(requests))
    starts: dict[str, float] = {}
    tokens: dict[str, list[float]] = {name: [] for name in requests}
    errors: dict[str, str] = {}
    num_open = 0
    began = time.perf_counter()
    while waiting or num_open:
        while num_open < limit and waiting:
            name = waiting.pop()
            starts[name] = time.perf_counter()
            engine.add(requests[name])
            num_open += 1
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            tokens[delta.request_id] += [now] * len(delta.tokens)
            num_open -= delta.finish_reason is not None
            if delta.finish_reason not in (None, "length"):
                errors[delta.request_id] = delta.error or f"ended by {delta.finish_reason}"
            on_token()
    duration_s = time.perf_counter() - began
    times = [
        RequestTimes(
            input_len=len(request.prompt),
            output_len=len(tokens[name]),
            start_s=starts[name],
            parts_s=tuple(tokens[name]),
            error=errors.get(name),
        )
        for name, request in requests.items()
    ]
    return times, duration_s


# Longer than the largest page (128 tokens), and a multiple of none.
PROMPT_LEN, OUTPUT_LEN = 150, 8
CONTEXT = PROMPT_LEN + OUTPUT_LEN
# Prompts at once: a batch is checked, too, but no longer than it must be.
MAX_PROMPTS = 8
# Different tokens of a prompt: the mean of many different values would be small, and so would be
# what is missing without attention.
NUM_TOKENS = 16
# The root mean square of the log-probabilities' differences, in standard deviations of the logits.
# e4m3 rounds a value by 2.6 % in the root mean square, values and probabilities together by 3.7 %
# (e5m2: 7.3 %) in a layer whose attention averages nothing. The next layers make more of it: 8.4 %
# after 32 random layers, 2 % after 2. Five times 3.7 % is wrong. BF16 rounds what every layer adds,
# at other places than the stock model: 1.8 % for 32 layers, 2.6 % was measured with Llama-3.1-8B's
# sizes on an H200; three times that is wrong. Attention that returns zeros is at 44 % or more.
MAX_ERROR = {"float32": 1e-3, "plain": 0.08, "e4m3": 0.18, "e5m2": 0.36}
# How much more random layers make of a rounding depends on their sizes: compiled on an H200,
# Llama-3.1-8B's were at 5.3 % in BF16 and five times that with e4m3. So where a plain row has gone
# before, FP8 may be so many times its error, but never as far as attention that returns zeros.
TIMES_PLAIN = {"e4m3": 8, "e5m2": 16}
HIGHEST = 0.42
# Of the result of an FP8 linear layer, in the root mean square: both operands are rounded by 2.7 %,
# which is 3.8 % of their product; half as much again is wrong.
MAX_LINEAR_ERROR = 0.057


@dataclass(frozen=True)
class Answer:
    """What a row's engine said to a short prompt."""

    prompt: tuple[int, ...]
    completion: Completion


def check_prompts(vocab_size: int, max_num_seqs: int) -> list[Prompt]:
    """The short prompts that an engine answers in its check, as many as run at once."""
    generator = torch.Generator().manual_seed(1)
    num_prompts = min(max_num_seqs, MAX_PROMPTS)
    few = torch.randint(0, vocab_size, (num_prompts, NUM_TOKENS), generator=generator)
    places = torch.randint(0, NUM_TOKENS, (num_prompts, PROMPT_LEN), generator=generator)
    return [Prompt(OUTPUT_LEN, tuple(tokens)) for tokens in few.gather(1, places).tolist()]


def ask(engine: Engine, vocab_size: int) -> list[Answer]:
    """Let the engine answer the check's prompts; no others may be open in it."""
    num_top = min(MAX_LOGPROBS, vocab_size)
    prompts = check_prompts(vocab_size, engine.settings.max_num_seqs)
    deltas: dict[str, list[Delta]] = {f"check-{index}": [] for index in range(len(prompts))}
    for name, one in zip(deltas, prompts, strict=True):
        sampling = Sampling(
            temperature=0, max_tokens=one.output_len, ignore_eos=True, logprobs=num_top
        )
        engine.add(Request(request_id=name, prompt=one.tokens, sampling=sampling))
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    answers = [
        Answer(one.tokens, gather(own)) for one, own in zip(prompts, deltas.values(), strict=True)
    ]
    for answer in answers:
        if answer.completion.finish_reason != "length":
            raise OctavoError(f"the check's prompt failed: {answer.completion.error}")
    return answers


def check_row(
    subject: Subject, row: Row, settings: EngineSettings, plain_error: float | None = None
) -> dict[str, float]:
    """The errors of an engine of this row, before any time goes into it; raises if it is wrong.

    relative_rms: as `judge` finds it. If linear layers are FP8, linear_rms, as `judge_linear` finds
    it, and linear_rounding, what they cost the logits.
    """
    with open_engine(subject, row, settings) as engine:
        answers = ask(engine, subject.vocab_size)
        own = replace(subject, model=engine.model)
    if row.linear is None:
        return {"relative_rms": judge(own, row, answers, plain_error)}
    linear_rms = judge_linear(subject, own, row, answers[0])
    rounding = max(_linear_rounding(subject.model, own.model, answer) for answer in answers)
    error = judge(own, row, answers, plain_error, rounding)
    return {"relative_rms": error, "linear_rms": linear_rms, "linear_rounding": rounding}


@torch.no_grad()
def judge(
    subject: Subject,
    row: Row,
    answers: Sequence[Answer],
    plain_error: float | None = None,
    linear_rounding: float = 0.0,
) -> float:
    """How far log-probabilities are from the stock model's at most; raises if they are wrong.

    Runs the model as transformers has it: after the engine was closed. plain_error: of a row that
    is not quantized. linear_rounding: what FP8 linear layers cost, in the same unit; those of the
    engine round otherwise than the model's, so that two such costs lie between them.
    """
    model = subject.model
    is_exact = model.dtype == torch.float32 and row.kv_cache is None
    limit = MAX_ERROR["float32" if is_exact else "plain"]
    if row.kv_cache is not None:
        fmt = row.kv_cache.format
        limit = MAX_ERROR[fmt]
        if plain_error is not None:
            limit = min(max(limit, TIMES_PLAIN[fmt] * plain_error), max(limit, HIGHEST))
    if not is_exact:
        limit = math.hypot(limit, math.sqrt(2) * linear_rounding)
    errors = []
    for answer in answers:
        tokens = answer.completion.tokens
        if is_exact and tokens != (expected := _generate(model, answer.prompt)):
            raise UnsupportedError(
                f"{row.name} is wrong: expected the tokens of generate() in float32, {expected}, "
                f"got {tokens}"
            )
        wanted = (
            f"log-probabilities within {limit:g} standard deviations of the stock model's logits"
        )
        errors.append(expect_within(limit, _relative_error(model, answer), row.name, wanted))
    return max(errors)


@torch.no_grad()
def judge_linear(subject: Subject, own: Subject, row: Row, answer: Answer) -> float:
    """The largest error of a linear layer in FP8 beside its plain one, on the same input.

    own: with the FP8 layers. Raises if one is wrong.
    """
    errors: dict[str, float] = {}

    def compare(name: str, layer: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        plain = subject.model.get_submodule(name)(*inputs)
        errors[name] = relative_rms(output, plain)

    layers = {n: m for n, m in own.model.named_modules() if isinstance(m, Fp8Linear)}
    hooks = [m.register_forward_hook(partial(compare, n)) for n, m in layers.items()]
    try:
        _logits(own.model, answer)
    finally:
        for hook in hooks:
            hook.remove()
    if missing := layers.keys() - errors:
        raise UnsupportedError(f"{row.name}: expected all FP8 layers to run, got none of {missing}")
    worst = max(errors, key=lambda name: errors[name])
    wanted = (
        f"results of linear layers within {MAX_LINEAR_ERROR:g} of the plain ones, as in {worst}"
    )
    return expect_within(MAX_LINEAR_ERROR, errors[worst], row.name, wanted)


def _generate(model: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What generate() answers, greedy; neither an end nor penalties of the model's own count."""
    ids = torch.tensor([prompt], device=model.device)
    own = model.generation_config
    model.generation_config = type(own)()
    try:
        out = model.generate(ids, max_new_tokens=OUTPUT_LEN, do_sample=False, pad_token_id=0)
    finally:
        model.generation_config = own
    return tuple(out[0, len(prompt) :].tolist())


def _relative_error(model: Any, answer: Answer) -> float:
    completion = answer.completion
    assert completion.logprobs is not None
    logits = _logits(model, answer)
    tokens = torch.tensor([[t for t, _ in one.top] for one in completion.logprobs])
    own = torch.tensor([[value for _, value in one.top] for one in completion.logprobs])
    truth = logits.log_softmax(-1).gather(1, tokens.to(logits.device)).cpu()
    spread = logits.std(-1).cpu()[:, None]
    return float(((own - truth) / spread).square().mean().sqrt())


@torch.no_grad()
def _linear_rounding(plain: Any, own: Any, answer: Answer) -> float:
    """How far the logits of a model with FP8 layers are from those of the plain one."""
    truth, rounded = _logits(plain, answer), _logits(own, answer)
    difference = rounded.log_softmax(-1) - truth.log_softmax(-1)
    return float((difference / truth.std(-1, keepdim=True)).square().mean().sqrt())


def _logits(model: Any, answer: Answer) -> torch.Tensor:
    """The logits [tokens of the answer, vocab] from which a model would choose each of them."""
    ids = torch.tensor([[*answer.prompt, *answer.completion.tokens]], device=model.device)
    logits: torch.Tensor = model(ids[:, :-1], use_cache=False).logits
    return logits[0, len(answer.prompt) - 1 :].float()
