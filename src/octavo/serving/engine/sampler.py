"""The next token of every row of logits: penalties, masks, temperature, cuts, a seeded draw.

Order: logit_bias, repetition penalty (prompt and output), presence and frequency penalties (output
alone), min_tokens, the allowed tokens, temperature, top_k, top_p, min_p, the draw. Cuts are
thresholds: tokens that are equal to the last one inside stay inside.

A draw depends on the row's own logits, its seed and the new token's position, and on nothing else
in the batch: the token is argmax(logit / temperature + g), which has the probabilities of a softmax
when g = -log(-log(1 - v)) and v is uniform (Gumbel's trick). v is a hash of seed, position, token:

    mix(z)  = splitmix64's: z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27;
              z *= 0x94D049BB133111EB; z ^= z >> 31          (modulo 2**64, shifts fill with zeros)
    key     = mix(mix(seed + GOLDEN) + position * GOLDEN)    GOLDEN = 0x9E3779B97F4A7C15
    v       = mix(key + (token + 1) * GOLDEN) mod 2**63 / 2**63, as float64 in [2**-64, 1 - 2**-53]

v has the same bits on every device. Logarithms and exponentials are taken in float64 and rounded:
how a device rounds their last bit, which may depend on the place in a tensor, is not seen. What
decides a cut is an order or a sum of integers, which no batch and no order of summing can change.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.serving.engine.request import Sampling, TokenLogprobs

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MIN_UNIFORM, MAX_UNIFORM = 2.0**-64, 1 - 2.0**-53
# Weights exp(logit - peak) as integers: MAX_VOCAB of them have a sum of 2**62 at most.
MAX_VOCAB, WEIGHT_ONE = 2**20, 2.0**42
# Beyond these float32 has no quotient; the draw is then the likeliest token, or any token.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
# Numbers that a CPU makes at once: they stay in its cache.
CACHED_NUMBERS = 2**17
OK, NOT_FINITE, NOTHING_LEFT = range(3)
REASONS = {
    NOT_FINITE: "expected logits that are finite or -inf, one finite at least, got others",
    NOTHING_LEFT: "no token is left: the grammar, min_tokens and logits of -inf forbid all of them",
}


class SamplerRow(NamedTuple):
    """What a row of logits is for; the new token's position is len(output) + num_pending.

    num_pending: tokens that follow the output, and are drawn, but were not read yet; penalties do
    not see them.
    allowed: bool [vocab], or int32 [ceil(vocab / 32)] with a bit for each token, lowest first, as
    `guided` makes them; tokens behind its end are forbidden.
    """

    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]
    seed: int
    allowed: Tensor | None = None
    num_pending: int = 0

    @property
    def position(self) -> int:
        """The new token's place in the answer."""
        return len(self.output) + self.num_pending


class Sampled(NamedTuple):
    """A token, and its log-probability if its row asked for one."""

    token: int
    logprobs: TokenLogprobs | None = None


Reason = str  # why a row gets no token


class Draws:
    """Tokens on the device, int64 [rows], and what is told of them on its way to the host."""

    def __init__(self, values: Tensor, rows: Sequence[SamplerRow]) -> None:
        self.tokens, self.rows = values[: len(rows)], rows
        self._host, self._event = values, None
        if values.is_cuda:
            self._host, self._event = values.to("cpu", non_blocking=True), torch.cuda.Event()
            self._event.record()

    def values(self) -> Tensor:
        """What came to the host; waits for it, and for nothing that was queued later."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Sampler:
    """Draws a token for each row of logits; the device is read once for all of them.

    eos_tokens: forbidden, as a row's stop_token_ids are, before its min_tokens.
    """

    def __init__(
        self, vocab_size: int, device: torch.device | str, *, eos_tokens: Sequence[int] = ()
    ) -> None:
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise ConfigError(f"expected vocab_size in [1, {MAX_VOCAB}], got {vocab_size}")
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self.eos_tokens = tuple(eos_tokens)
        steps = torch.arange(1, vocab_size + 1, dtype=torch.int64)
        self._steps = (steps * _signed(GOLDEN)).to(self.device)  # (token + 1) * GOLDEN
        self._prompts: dict[int, tuple[Sequence[int], Tensor]] = {}

    def sample(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled | Reason]:
        """One token for each row of logits [len(rows), vocab_size].

        Log-probabilities are those of the model itself, before biases, penalties, masks and
        temperature. A row with NaN, inf or no token left has a sentence in place of its token.
        """
        return self.read(self.draw(logits, rows)) if rows else []

    def draw(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Draws:
        """As `sample`, for `read` to tell later; nothing here waits for the device."""
        return Draws(self._enqueue(logits, rows), rows)

    def read(self, draws: Draws) -> list[Sampled | Reason]:
        """The tokens of a draw; waits for them."""
        values, num_rows = draws.values(), len(draws.rows)
        tokens, state = values[: 2 * num_rows].view(2, num_rows).tolist()
        found: list[Sampled | Reason] = [
            Sampled(token) if why == OK else REASONS[why]
            for token, why in zip(tokens, state, strict=True)
        ]
        asking = self._asking(draws.rows)
        if not asking:
            return found
        columns = values[2 * num_rows :].view(len(asking), -1)
        num_top = columns.shape[1] // 2
        ids = columns[:, 1 : 1 + num_top].tolist()
        numbers = columns.to(torch.int32).view(torch.float32).tolist()
        for place, index in enumerate(asking):
            own, tops = numbers[place][0], numbers[place][1 + num_top :]
            best = zip(ids[place], tops[: draws.rows[index].sampling.logprobs], strict=False)
            possible = tuple((token, logprob) for token, logprob in best if logprob > -math.inf)
            if state[index] == OK:
                logprobs = TokenLogprobs(tokens[index], own, possible)
                found[index] = Sampled(tokens[index], logprobs)
        return found

    def _enqueue(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Everything that `read` needs, as one int64 tensor; nothing here waits for the device."""
        if not rows or logits.shape != (len(rows), self.vocab_size):
            raise ConfigError(
                f"expected logits [{len(rows)}, {self.vocab_size}] of one row or more, got "
                f"{list(logits.shape)}"
            )
        if self._prompts:
            in_use = {id(row.prompt) for row in rows}
            self._prompts = {key: entry for key, entry in self._prompts.items() if key in in_use}
        scores = self._edit(logits, rows)
        peaks, tokens = scores.max(dim=-1)  # the first of equals
        random = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
        if len(random) == len(rows):
            tokens = self._draw(scores, peaks, rows)
        elif random:
            where = self._ints(random)
            chosen = [rows[index] for index in random]
            tokens[where] = self._draw(scores[where], peaks[where], chosen)
        is_finite = (peaks if scores is logits else logits.amax(dim=-1)).isfinite()
        state = torch.where(peaks == -math.inf, NOTHING_LEFT, OK)
        state = torch.where(is_finite, state, NOT_FINITE)
        return torch.cat([tokens, state, *self._logprobs(logits, tokens, rows)])

    def _edit(self, scores: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Scores after biases, penalties and masks: the same tensor without any, else a copy."""
        penalized, masked = [], []
        biased: list[tuple[int, int, float]] = []  # (row, token, bias)
        forbidden: list[tuple[int, int]] = []  # (row, token)
        for i, row in enumerate(rows):
            sampling = row.sampling
            if sampling.logit_bias:
                biased += [(i, token, bias) for token, bias in sampling.logit_bias]
            if sampling.has_penalty:
                penalized.append(i)
            if row.position < sampling.min_tokens:
                ends = (*self.eos_tokens, *sampling.stop_token_ids)
                forbidden += [(i, token) for token in ends if 0 <= token < self.vocab_size]
            if row.allowed is not None:
                masked.append(i)
        if not (biased or penalized or forbidden or masked):
            return scores
        scores = scores.to(torch.float32, copy=True)
        if biased:
            of_rows, tokens, biases = zip(*biased, strict=True)
            scores[self._ints(of_rows), self._ints(tokens)] += self._column(biases)[:, 0]
        if penalized:
            where = self._ints(penalized)
            scores[where] = self._penalized(scores[where], [rows[i] for i in penalized])
        if forbidden:
            lines, ids = self._ints([list(column) for column in zip(*forbidden, strict=True)])
            scores[lines, ids] = -math.inf
        if masked:
            where = self._ints(masked)
            is_allowed = self._is_allowed(
                [mask for row in rows if (mask := row.allowed) is not None]
            )
            scores[where] = scores[where].masked_fill(~is_allowed, -math.inf)
        return scores

    def _penalized(self, scores: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Scores after all penalties; what a row does not ask for leaves its scores as they are."""
        counts = self._counts([row.output for row in rows])
        settings = [row.sampling for row in rows]
        if any(one.repetition_penalty != 1 for one in settings):
            has_seen = self._in_prompts(rows) | (counts > 0)
            penalty = self._column([one.repetition_penalty for one in settings])
            weighed = torch.where(scores > 0, scores / penalty, scores * penalty)
            scores = torch.where(has_seen, weighed, scores)
        frequency = self._column([one.frequency_penalty for one in settings])
        presence = self._column([one.presence_penalty for one in settings])
        return scores - (frequency * counts + presence * (counts > 0))

    def _counts(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """How often each token is in each text: float32 [len(texts), vocab]."""
        ids = array("q")
        for text in texts:
            ids.extend(text)
        counts = torch.zeros(len(texts) * self.vocab_size, device=self.device)
        if ids:
            tokens = torch.frombuffer(ids, dtype=torch.int64)
            lengths = torch.tensor([len(text) for text in texts])
            flat = tokens + (torch.arange(len(texts)) * self.vocab_size).repeat_interleave(lengths)
            # Without ids that have no logit: an image's place may be one.
            flat = self._put(flat[(tokens >= 0) & (tokens < self.vocab_size)])
            counts.index_put_((flat,), torch.ones((), device=self.device), accumulate=True)
        return counts.view(len(texts), self.vocab_size)

    def _in_prompts(self, rows: Sequence[SamplerRow]) -> Tensor:
        """Whether each token is in the row's prompt: bool [len(rows), vocab].

        A prompt may be long and is the same in every step: what it has is kept while it is asked
        for. Only tuples are, for a list may change; holding them keeps their ids from others.
        """
        prompts = []
        for row in rows:
            entry = self._prompts.get(id(row.prompt))
            entry = entry or (row.prompt, self._counts([row.prompt])[0] > 0)
            if isinstance(row.prompt, tuple):
                self._prompts[id(row.prompt)] = entry
            prompts.append(entry[1])
        return torch.stack(prompts)

    def _is_allowed(self, masks: list[Tensor]) -> Tensor:
        """Masks of any kind and length as bool [len(masks), vocab]."""
        is_allowed = torch.zeros(len(masks), self.vocab_size, dtype=torch.bool, device=self.device)
        # As a grammar makes them, they are moved together.
        are_alike = all(x.dtype == torch.int32 and x.shape == masks[0].shape for x in masks)
        for place, mask in enumerate([torch.stack(masks)] if are_alike else masks):
            line = is_allowed if are_alike else is_allowed[place, None]
            bits = self._put(mask)
            if mask.dtype == torch.int32:
                bits = (bits[..., None] >> torch.arange(32, device=self.device)) & 1
                bits = bits.flatten(-2)
            elif mask.dtype != torch.bool or mask.ndim != 1:
                raise ConfigError(
                    f"expected allowed as bool [vocab] or int32 [vocab / 32], got {mask.dtype} "
                    f"{list(mask.shape)}"
                )
            bits = bits[..., : self.vocab_size].bool()
            line[:, : bits.shape[-1]] = bits
        return is_allowed

    def _draw(self, scores: Tensor, peak: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """A token for each row of scores with a temperature above 0."""
        temperatures = [row.sampling.temperature for row in rows]
        temperature = self._column(
            [min(max(one, MIN_TEMPERATURE), MAX_TEMPERATURE) for one in temperatures]
        )
        scaled = (scores.float() - peak.float()[:, None]) / temperature  # the likeliest one has 0
        cut = [index for index, row in enumerate(rows) if row.sampling.has_cut]
        if cut:
            where = self._ints(cut)
            part = scaled if len(cut) == len(rows) else scaled[where]
            threshold = self._threshold(part, [rows[index].sampling for index in cut])
            scaled[where] = part.masked_fill(part < threshold, -math.inf)
        return scaled.add_(self._gumbel(self._put(_draw_keys(rows)))).argmax(dim=-1)

    def _threshold(self, scaled: Tensor, settings: Sequence[Sampling]) -> Tensor:
        """The lowest score that top_k, top_p and min_p leave: float32 [len(settings), 1]."""
        min_p = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in settings]
        threshold = self._column(min_p)
        with_top_p = [line for line, one in enumerate(settings) if one.top_p < 1]
        others = [line for line, one in enumerate(settings) if one.top_p == 1 and one.top_k > 0]
        for lines in filter(None, (others, with_top_p)):
            where = self._ints(lines)
            chosen = [settings[line] for line in lines]
            least = self._top(scaled[where], chosen, has_top_p=lines is with_top_p)
            threshold[where] = torch.maximum(threshold[where], least)
        return threshold

    def _top(self, scaled: Tensor, settings: Sequence[Sampling], has_top_p: bool) -> Tensor:
        """The lowest score inside top_k and then, of what it leaves, inside top_p."""
        num_kept = [min(one.top_k or self.vocab_size, self.vocab_size) for one in settings]
        if max(num_kept) < self.vocab_size:
            best = scaled.topk(max(num_kept), dim=-1).values
        else:
            best = scaled.sort(dim=-1, descending=True).values
        last = self._ints(num_kept)[:, None] - 1
        if has_top_p:
            weights = (best.double().exp() * WEIGHT_ONE).to(torch.int64)
            weights *= torch.arange(best.shape[1], device=self.device) <= last
            sums = weights.cumsum(dim=-1)
            share = self._column([one.top_p for one in settings], torch.float64)
            is_short = sums < share * sums[:, -1:].double()
            last = torch.minimum(last, is_short.sum(dim=-1, keepdim=True))
        return best.gather(1, last)

    def _gumbel(self, keys: Tensor) -> Tensor:
        """g of the module's text for each key and token: float32 [len(keys), vocab]."""
        is_cpu = self.device.type == "cpu"
        num_keys = max(CACHED_NUMBERS // self.vocab_size, 1) if is_cpu else len(keys)
        parts = (self._uniform(part) for part in keys.split(num_keys))
        return torch.cat([part.neg_().log1p_().neg_().log_().neg_().float() for part in parts])

    def _uniform(self, keys: Tensor) -> Tensor:
        """v of the module's text for each key and token: float64 [len(keys), vocab]."""
        bits = _mix_(keys[:, None] + self._steps)
        values = bits.bitwise_and_(2**63 - 1).double().mul_(2.0**-63)
        return values.clamp_(MIN_UNIFORM, MAX_UNIFORM)

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, rows: Sequence[SamplerRow]
    ) -> Iterator[Tensor]:
        """For each row that asks, its own log-probability, the best tokens, and theirs; flat.

        Log-probabilities are float32, seen as integers.
        """
        asking = self._asking(rows)
        if not asking:
            return
        where = self._ints(asking)
        raw = logits[where].float()
        normalizer = raw.logsumexp(dim=-1, keepdim=True)
        own = raw.gather(1, tokens[where][:, None]) - normalizer
        # Scores as integers of the same order, the lower of two equal tokens first.
        bits = (raw + 0.0).view(torch.int32)
        order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
        order += self.vocab_size - 1 - torch.arange(self.vocab_size, device=self.device)
        num_top = min(max(rows[index].sampling.logprobs or 0 for index in asking), self.vocab_size)
        best = order.topk(num_top, dim=-1).values
        ids = self.vocab_size - 1 - (best & 0xFFFFFFFF)
        top = raw.gather(1, ids) - normalizer
        yield torch.cat([own.view(torch.int32), ids, top.view(torch.int32)], dim=1).flatten()

    @staticmethod
    def _asking(rows: Sequence[SamplerRow]) -> list[int]:
        """The rows that ask for log-probabilities."""
        return [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]

    def _ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return self._put(torch.tensor(values, dtype=torch.int64))

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._put(torch.tensor(values, dtype=dtype)[:, None])

    def _put(self, values: Tensor) -> Tensor:
        """Values of the host on the device; from pinned memory, so that nobody waits."""
        if self.device.type == "cuda" and values.device.type == "cpu":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)


def _draw_keys(rows: Sequence[SamplerRow]) -> Tensor:
    """The key of each row's draw, int64 on the host: see the module's text."""
    seeds = torch.tensor([row.seed for row in rows])
    positions = torch.tensor([row.position for row in rows])
    golden = _signed(GOLDEN)
    return _mix_(_mix_(seeds + golden) + positions * golden)


def _mix_(values: Tensor) -> Tensor:
    """mix of the module's text in place; int64 wraps as it does there."""
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        values ^= (values >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        if multiplier != 1:
            values *= _signed(multiplier)
    return values


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
