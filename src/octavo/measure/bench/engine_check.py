"""Whether an engine computes what its model does, before one like it is timed.

Every row answers short prompts greedily. Its log-probabilities are compared with those that the
stock model gives the same tokens (teacher forcing): where two logits are close, BF16 and another
order of sums may choose differently, and all later tokens with them, which is no error. In float32
nothing is close enough for that: there, keys and values stored as they are must give the tokens of
`model.generate()`.

Linear layers in FP8 are part of the model that an engine is compared with. They are looked at by
themselves, each beside the plain one with the same input: random layers after it make more of what
it rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from octavo.errors import OctavoError, UnsupportedError
from octavo.layers.linear import Fp8Linear
from octavo.measure.bench.engine import Subject, open_engine
from octavo.measure.rows import Row
from octavo.numerics.error import relative_rms
from octavo.serving.engine.engine import Engine
from octavo.serving.engine.request import MAX_LOGPROBS, Completion, Delta, Request, Sampling, gather
from octavo.serving.engine.settings import EngineSettings

# Longer than the largest page (128 tokens), and a multiple of none.
PROMPT_LEN, OUTPUT_LEN = 150, 8
CONTEXT = PROMPT_LEN + OUTPUT_LEN
# Prompts at once: a batch is checked, too, but no longer than it must be.
MAX_PROMPTS = 8
# Different tokens of a prompt: the mean of many different values would be small, and so would be
# what is missing without attention.
NUM_TOKENS = 16
# The root mean square of the log-probabilities' differences, in standard deviations of the logits.
# e4m3 has 3 bits after the point: a value is rounded by 2^-4 of itself at most, by 2.6 % in the
# root mean square. Values and probabilities are both rounded, which is √2 of it for a layer whose
# attention averages nothing: 3.7 %, or 7.3 % with the 2 bits of e5m2. What one layer gets wrong the
# next ones see, which took 32 random layers to 8.4 % (5 % at 16, 2 % at 2); 5 times 3.7 % is wrong.
# BF16 rounds what every layer adds, the stock model at other places than the engine:
# √(2 · 64 roundings) · 0.16 % is 1.8 % for 32 layers, 1.7 % on a CPU, 2.6 % was measured with
# Llama-3.1-8B's sizes on an H200; three times that is wrong.
# Attention that returns zeros, in prompts or afterwards, is at 44 % or more.
MAX_ERROR = {"float32": 1e-3, "plain": 0.08, "e4m3": 0.18, "e5m2": 0.36}
# How much more random layers make of a rounding depends on their sizes: Llama-3.1-8B's, compiled on
# an H200, were at 5.3 % in BF16 and five times that with e4m3, as five to one as 8.4 % and 1.7 %
# on a CPU. So where a plain row has gone before, FP8 may be so many times its error, but never as
# far as attention that returns zeros.
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


def ask(engine: Engine, vocab_size: int) -> list[Answer]:
    """Let the engine answer short prompts, as many as run at once; no others may be open in it."""
    generator = torch.Generator().manual_seed(1)
    num_prompts = min(engine.settings.max_num_seqs, MAX_PROMPTS)
    few = torch.randint(0, vocab_size, (num_prompts, NUM_TOKENS), generator=generator)
    places = torch.randint(0, NUM_TOKENS, (num_prompts, PROMPT_LEN), generator=generator)
    drawn = few.gather(1, places).tolist()
    prompts = {f"check-{index}": tuple(row) for index, row in enumerate(drawn)}
    num_top = min(MAX_LOGPROBS, vocab_size)
    sampling = Sampling(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=num_top)
    for name, prompt in prompts.items():
        engine.add(Request(request_id=name, prompt=prompt, sampling=sampling))
    deltas: dict[str, list[Delta]] = {name: [] for name in prompts}
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    answers = [Answer(prompts[name], gather(found)) for name, found in deltas.items()]
    for answer in answers:
        if answer.completion.finish_reason != "length":
            raise OctavoError(f"the check's prompt failed: {answer.completion.error}")
    return answers


def check_row(
    subject: Subject,
    row: Row,
    settings: EngineSettings,
    plain_error: float | None = None,
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

    Runs the model as transformers has it: after the engine was closed. plain_error: of a row with
    keys and values as they are, in the same dtype. linear_rounding: what FP8 in the model's own
    linear layers costs, in the same unit. Where the engine's values differ by as much as a rounding
    step, its layers round otherwise than the model's, and two such costs lie between them.
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
    worst = 0.0
    for answer in answers:
        tokens = answer.completion.tokens
        if is_exact and tokens != (expected := _generate(model, answer.prompt)):
            raise UnsupportedError(
                f"{row.name} is wrong: expected the tokens of generate() in float32, {expected}, "
                f"got {tokens}"
            )
        error = _relative_error(model, answer)
        if math.isnan(error) or error > limit:
            raise UnsupportedError(
                f"{row.name} is wrong: expected log-probabilities within {limit:g} standard "
                f"deviations of the stock model's logits, got {error:.3g}"
            )
        worst = max(worst, error)
    return worst


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
    if not errors[worst] <= MAX_LINEAR_ERROR:  # nor if it is NaN
        raise UnsupportedError(
            f"{row.name} is wrong: expected results of linear layers within {MAX_LINEAR_ERROR:g} "
            f"of the plain ones, got {errors[worst]:.3g} in {worst}"
        )
    return errors[worst]


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
