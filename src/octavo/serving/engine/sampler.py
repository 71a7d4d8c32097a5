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
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, OctavoError
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


class Draws:
    """Tokens on the device, and all that is told about them on its way to the host.

    tokens: int64 [rows].
    """

    def __init__(self, values: Tensor, rows: Sequence[SamplerRow]) -> None:
        self.tokens, self.rows = values[: len(rows)], rows
        self._event: torch.cuda.Event | None = None
        self._host = values
        if values.is_cuda:
            self._host = values.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def values(self) -> list[int]:
        """What came to the host; waits for it, and for nothing that was queued later."""
        if self._event is not None:
            self._event.synchronize()
        values: list[int] = self._host.tolist()
        return values


class Sampled(NamedTuple):
    """A token, and its log-probability if its row asked for one."""

    token: int
    logprobs: TokenLogprobs | None = None


class LogitsError(OctavoError):
    """Rows that no token can be drawn from; the others have theirs.

    reasons: a sentence for each such row. sampled: what `sample` would have returned, None in the
    place of these rows.
    """

    def __init__(self, reasons: dict[int, str], sampled: list[Sampled | None]) -> None:
        self.reasons, self.sampled = reasons, sampled
        super().__init__("; ".join(f"row {row}: {reason}" for row, reason in reasons.items()))

    @property
    def rows(self) -> tuple[int, ...]:
        """The indices of the rows that have no token."""
        return tuple(self.reasons)


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

    def sample(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
        """One token for each row of logits [len(rows), vocab_size].

        Log-probabilities are those of the model itself, before biases, penalties, masks and
        temperature. A row with NaN, inf or no token left raises LogitsError for itself alone: the
        error has the other rows' tokens.
        """
        return self.read(self.draw(logits, rows)) if rows else []

    def draw(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Draws:
        """As `sample`, for `read` to tell later; nothing here waits for the device."""
        if not rows or logits.shape != (len(rows), self.vocab_size):
            raise ConfigError(
                f"expected logits [{len(rows)}, {self.vocab_size}] of one row or more, got "
                f"{list(logits.shape)}"
            )
        return Draws(self._enqueue(logits, rows), rows)

    def read(self, draws: Draws) -> list[Sampled]:
        """The tokens of a draw, or its LogitsError."""
        return self._read(draws.values(), draws.rows)

    def _enqueue(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Everything that `_read` needs, as one int64 tensor; nothing here waits for the device."""
        if self._prompts:
            in_use = {id(row.prompt) for row in rows}
            self._prompts = {key: entry for key, entry in self._prompts.items() if key in in_use}
        greedy = [index for index, row in enumerate(rows) if row.sampling.temperature == 0]
        highest: Tensor | None = None
        if len(greedy) in (0, len(rows)):
            scores = self._edit(logits, rows)
            tokens, peaks = self._choose(scores, rows)
            highest = peaks if scores is logits else None
        else:
            tokens = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
            peaks = torch.zeros(len(rows), dtype=torch.float32, device=self.device)
            random = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
            for indices in (greedy, random):
                where = self._ints(indices)
                chosen = [rows[index] for index in indices]
                scores = self._edit(logits.index_select(0, where), chosen)
                tokens[where], peaks[where] = self._choose(scores, chosen)
        is_finite = (logits.amax(dim=-1) if highest is None else highest).isfinite()
        state = torch.where(peaks == -math.inf, NOTHING_LEFT, OK)
        state = torch.where(is_finite, state, NOT_FINITE)
        return torch.cat([tokens, state, *self._logprobs(logits, tokens, rows)])

    def _choose(self, scores: Tensor, rows: Sequence[SamplerRow]) -> tuple[Tensor, Tensor]:
        """Tokens of rows that are all greedy or all not, and their highest scores, float32."""
        peak, tokens = scores.max(dim=-1)  # the first of equals
        if rows[0].sampling.temperature > 0:
            tokens = self._draw(scores, peak, rows)
        return tokens, peak.float()

    def _read(self, values: list[int], rows: Sequence[SamplerRow]) -> list[Sampled]:
        num_rows = len(rows)
        tokens, state = values[:num_rows], values[num_rows : 2 * num_rows]
        sampled: list[Sampled] = [Sampled(token) for token in tokens]
        asking = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
        if asking:
            own = _floats(values[2 * num_rows : 2 * num_rows + len(asking)])
            num_top = self._num_top(rows)
            rest = values[2 * num_rows + len(asking) :]
            ids, tops = rest[: len(rest) // 2], _floats(rest[len(rest) // 2 :])
        for place, index in enumerate(asking):
            first = place * num_top
            last = first + min(rows[index].sampling.logprobs or 0, num_top)
            top = zip(ids[first:last], tops[first:last], strict=True)
            possible = tuple((token, logprob) for token, logprob in top if logprob > -math.inf)
            logprobs = TokenLogprobs(tokens[index], own[place], possible)
            sampled[index] = Sampled(tokens[index], logprobs)
        reasons = {index: REASONS[why] for index, why in enumerate(state) if why != OK}
        if reasons:
            others = [None if index in reasons else one for index, one in enumerate(sampled)]
            raise LogitsError(reasons, others)
        return sampled

    def _edit(self, scores: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Scores after biases, penalties and masks: the same tensor without any, else a copy."""
        with_repetition, with_counts, forbidden, masked = [], [], [], []
        biased: list[tuple[int, int, float]] = []  # (row, token, bias)
        for i, row in enumerate(rows):
            sampling = row.sampling
            if sampling.logit_bias:
                biased += [(i, token, bias) for token, bias in sampling.logit_bias]
            if sampling.repetition_penalty != 1:
                with_repetition.append(i)
            if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
                with_counts.append(i)
            if row.position < sampling.min_tokens:
                forbidden += [(i, token) for token in self._ends(sampling)]
            if row.allowed is not None:
                masked.append(i)
        if not (biased or with_repetition or with_counts or forbidden or masked):
            return scores
        scores = scores.to(torch.float32, copy=True)
        if biased:
            of_rows, tokens, biases = zip(*biased, strict=True)
            scores[self._ints(of_rows), self._ints(tokens)] += self._column(biases)[:, 0]
        if with_repetition:
            where = self._ints(with_repetition)
            has_seen = self._has_seen([rows[i] for i in with_repetition])
            penalty = self._column([rows[i].sampling.repetition_penalty for i in with_repetition])
            part = scores[where]
            weighed = torch.where(part > 0, part / penalty, part * penalty)
            scores[where] = torch.where(has_seen, weighed, part)
        if with_counts:
            where = self._ints(with_counts)
            chosen = [rows[i] for i in with_counts]
            counts = self._counts([row.output for row in chosen])
            frequency = self._column([row.sampling.frequency_penalty for row in chosen])
            presence = self._column([row.sampling.presence_penalty for row in chosen])
            scores[where] -= frequency * counts + presence * (counts > 0)
        if forbidden:
            lines, ids = self._ints([list(column) for column in zip(*forbidden, strict=True)])
            scores[lines, ids] = -math.inf
        if masked:
            where = self._ints(masked)
            is_allowed = self._is_allowed([rows[i].allowed for i in masked])
            scores[where] = scores[where].masked_fill(~is_allowed, -math.inf)
        return scores

    def _ends(self, sampling: Sampling) -> list[int]:
        """Tokens that would end the row."""
        ids = (*self.eos_tokens, *sampling.stop_token_ids)
        return [token for token in ids if 0 <= token < self.vocab_size]

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

    def _has_seen(self, rows: Sequence[SamplerRow]) -> Tensor:
        """Whether each token is in the row's prompt or output: bool [len(rows), vocab].

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
        return torch.stack(prompts) | (self._counts([row.output for row in rows]) > 0)

    def _is_allowed(self, masks: Sequence[Tensor | None]) -> Tensor:
        """Masks of any kind and length as bool [len(masks), vocab]."""
        is_allowed = torch.zeros(len(masks), self.vocab_size, dtype=torch.bool, device=self.device)
        given = [mask for mask in masks if mask is not None]
        if all(mask.dtype == torch.int32 and mask.shape == given[0].shape for mask in given):
            words = self._put(torch.stack(given))
            bits = (words[:, :, None] >> torch.arange(32, device=self.device)) & 1
            packed = bits.flatten(1)[:, : self.vocab_size].bool()
            is_allowed[:, : packed.shape[1]] = packed
            return is_allowed
        for line, mask in enumerate(given):
            if mask.dtype == torch.int32:
                is_allowed[line] = self._is_allowed([mask])[0]
            elif mask.dtype == torch.bool and mask.ndim == 1:
                part = self._put(mask[: self.vocab_size])
                is_allowed[line, : part.shape[0]] = part
            else:
                raise ConfigError(
                    f"expected allowed as bool [vocab] or int32 [vocab / 32], got {mask.dtype} "
                    f"{list(mask.shape)}"
                )
        return is_allowed

    def _draw(self, scores: Tensor, peak: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """A token for each row of scores with a temperature above 0."""
        temperature = self._column([_clamped(row.sampling.temperature) for row in rows])
        scaled = (scores.float() - peak.float()[:, None]) / temperature  # the likeliest one has 0
        cut = [index for index, row in enumerate(rows) if _has_cut(row.sampling)]
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
        for has_top_p in (False, True):
            lines = [
                line
                for line, one in enumerate(settings)
                if (one.top_p < 1) == has_top_p and (one.top_p < 1 or one.top_k > 0)
            ]
            if lines:
                where = self._ints(lines)
                least = self._top(scaled[where], [settings[line] for line in lines], has_top_p)
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
    ) -> tuple[Tensor, ...]:
        """Bits of the tokens' own log-probabilities, the best tokens, bits of theirs; all flat."""
        asking = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
        if not asking:
            return ()
        where = self._ints(asking)
        raw = logits[where].float()
        normalizer = raw.logsumexp(dim=-1, keepdim=True)
        own = raw.gather(1, tokens[where][:, None]) - normalizer
        # Scores as integers of the same order, the lower of two equal tokens first.
        bits = (raw + 0.0).view(torch.int32)
        order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
        order += self.vocab_size - 1 - torch.arange(self.vocab_size, device=self.device)
        best = order.topk(self._num_top(rows), dim=-1).values
        ids = self.vocab_size - 1 - (best & 0xFFFFFFFF)
        top = raw.gather(1, ids) - normalizer
        return _bits(own), ids.flatten(), _bits(top)

    def _num_top(self, rows: Sequence[SamplerRow]) -> int:
        """How many alternatives are read for each row that asks for log-probabilities."""
        return min(max(row.sampling.logprobs or 0 for row in rows), self.vocab_size)

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


def _clamped(temperature: float) -> float:
    return min(max(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


def _has_cut(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).flatten().long()


def _floats(bits: Sequence[int]) -> list[float]:
    values: list[float] = torch.tensor(bits, dtype=torch.int32).view(torch.float32).tolist()
    return values
