"""The sampler: its order, its cuts, its draws, and that a row never notices the others."""

import dataclasses
import math
import random

import pytest
import torch

from octavo.errors import ConfigError
from octavo.serving.engine.request import Sampling
from octavo.serving.engine.sampler import (
    GOLDEN,
    Sampled,
    Sampler,
    SamplerRow,
    _draw_keys,
)

VOCAB = 50
INF = math.inf


def row(seed=0, prompt=(), output=(), allowed=None, **sampling):
    return SamplerRow(Sampling(max_tokens=1000, **sampling), prompt, output, seed, allowed)


def draw(logits, *rows, vocab_size=VOCAB, **settings):
    made = Sampler(vocab_size, "cpu", **settings)
    return [one.token for one in made.sample(torch.as_tensor(logits), rows)]


def support(logits, num_draws=300, **sampling):
    """Every token that comes in many draws from one row of logits."""
    logits = torch.tensor([logits] * num_draws)
    rows = [row(seed, **sampling) for seed in range(num_draws)]
    return set(draw(logits, *rows, vocab_size=logits.shape[1]))


def expect(logits, tokens, **options):
    """The greedy tokens of one row, each forbidden after it came: its order of preference."""
    left = torch.ones(len(logits), dtype=torch.bool)
    found = []
    for _ in tokens:
        one = row(temperature=0.0, allowed=left, **options)
        found += draw([logits], one, vocab_size=len(logits))
        left = left.clone()
        left[found[-1]] = False
    assert found == tokens


def test_no_rows():
    assert Sampler(VOCAB, "cpu").sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_equals(dtype):
    logits = torch.zeros(3, VOCAB, dtype=dtype)
    logits[1, 7] = logits[1, 9] = 2
    logits[2, :] = -INF
    logits[2, VOCAB - 1] = -5
    assert draw(logits, *[row(temperature=0.0)] * 3) == [0, 7, VOCAB - 1]


def test_wrong_shapes_are_refused():
    sampler = Sampler(VOCAB, "cpu")
    with pytest.raises(ConfigError, match=r"expected logits \[1, 50\] .*got \[2, 50\]"):
        sampler.sample(torch.zeros(2, VOCAB), [row()])
    with pytest.raises(ConfigError, match="vocab_size"):
        Sampler(0, "cpu")
    with pytest.raises(ConfigError, match="expected allowed as bool"):
        sampler.sample(torch.zeros(1, VOCAB), [row(allowed=torch.ones(VOCAB))])


def test_repetition_penalty_divides_what_is_above_zero_and_multiplies_what_is_below():
    # After a penalty of 2: 3 / 2, 1, -2 * 2, -3.
    logits = [3.0, 1.0, -2.0, -3.0]
    expect(logits, [0, 1, 2, 3], repetition_penalty=2.0)
    expect(logits, [0, 1, 3, 2], repetition_penalty=2.0, prompt=(0, 2, 2))
    expect([3.0, 1.6, 0.0, 0.0], [1, 0, 2, 3], repetition_penalty=2.0, output=[0])


def test_presence_and_frequency_count_the_output_alone():
    logits = [3.0, 2.5, 2.0]
    expect(logits, [0, 1, 2], presence_penalty=2.0, frequency_penalty=2.0, prompt=(0, 0, 1))
    expect(logits, [1, 2, 0], presence_penalty=1.5, output=[0, 0, 0])
    expect(logits, [0, 1, 2], frequency_penalty=0.4, output=[0])
    expect(logits, [2, 0, 1], frequency_penalty=0.4, output=[0, 0, 0, 1, 1])
    expect(logits, [2, 0, 1], frequency_penalty=-0.6, output=[2, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_added_to_the_models_own_logits(dtype):
    """Before everything else, and without a trace in the log-probabilities."""
    rows = random_rows(200, random.Random(3))
    assert sum(bool(one.sampling.logit_bias) for one in rows) > 50
    logits = (torch.randn(len(rows), VOCAB) * 2).to(dtype)
    biased = logits.float().clone()
    for i, one in enumerate(rows):
        for token, bias in one.sampling.logit_bias:
            biased[i, token] = biased[i, token] + bias
    plain = [
        one._replace(sampling=dataclasses.replace(one.sampling, logit_bias=())) for one in rows
    ]
    sampler = Sampler(VOCAB, "cpu", eos_tokens=[3])
    found, expected = sampler.sample(logits, rows), sampler.sample(biased, plain)
    assert [one.token for one in found] == [one.token for one in expected]
    assert [one.token for one in found] != [one.token for one in sampler.sample(logits, plain)]
    own = logits.float().log_softmax(dim=-1)
    for i, one in enumerate(found):
        if one.logprobs is not None:
            assert one.logprobs.logprob == pytest.approx(own[i, one.token].item(), abs=1e-5)


def test_a_bias_makes_tokens_as_likely_as_it_says():
    logits, num_draws = torch.tensor([0.3, 0.0, 1.0, -INF]), 20_000
    bias = ((0, 1.5), (1, -0.7), (3, 100))
    expected = torch.tensor([1.8, -0.7, 1.0, -INF]).double().softmax(dim=0) * num_draws
    rows = [row(seed, logit_bias=bias) for seed in range(num_draws)]
    tokens = torch.tensor(draw(logits.expand(num_draws, -1), *rows, vocab_size=4))
    counts = torch.bincount(tokens, minlength=4).double()
    assert counts[3] == 0  # what the model rules out stays out
    # 2 degrees of freedom: 18.4 has a probability of 1e-4.
    assert chi_square(counts[:3], expected[:3]) < 18.4


def test_a_bias_of_100_bans_or_forces():
    logits = torch.randn(1, VOCAB)
    best = logits.argmax().item()
    for temperature in (0.0, 1.0):
        forced = row(temperature=temperature, logit_bias=((17, 100),))
        assert draw(logits, forced) == [17]
        banned = [row(seed, temperature=temperature, logit_bias=((best, -100),)) for seed in (1, 2)]
        assert best not in draw(logits.expand(2, -1), *banned)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (((5, 100.1),), "logit_bias.0.1: expected a number less than or equal to 100, got 100.1"),
        (((5, math.nan),), "got nan"),
        (((5, INF),), "got inf"),
        (((5, 1.0), (5, 2.0)), "two for one"),
        (
            tuple((token, 1.0) for token in range(301)),
            "logit_bias: expected at most 300 items",
        ),
    ],
    ids=["large", "nan", "inf", "twice", "many"],
)
def test_a_bias_that_cannot_be_added_is_refused(bias, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(logit_bias=bias)


def test_ids_outside_the_vocabulary_have_no_logit():
    options = {"repetition_penalty": 2.0, "presence_penalty": 1.0}
    expect([1.0, 0.9], [0, 1], prompt=(-1, 2), output=[5], **options)


def test_a_prompt_is_looked_at_once_and_a_list_each_time():
    sampler = Sampler(VOCAB, "cpu")
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = 2.0, 1.5
    prompt = (3,) * 10
    for _ in range(3):
        one = row(temperature=0.0, repetition_penalty=2.0, prompt=prompt)
        assert sampler.sample(logits, [one])[0].token == 4
    assert len(sampler._prompts) == 1
    changing = []
    one = row(temperature=0.0, repetition_penalty=2.0, prompt=changing)
    assert sampler.sample(logits, [one])[0].token == 3
    changing.append(3)
    assert sampler.sample(logits, [one])[0].token == 4
    assert sampler._prompts == {}


def test_nothing_ends_before_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6], logits[0, 7] = 3, 2, 1
    options = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (6, VOCAB)}
    for output, token in [([], 7), ([1], 7), ([1, 1], 5)]:
        assert draw(logits, row(output=output, **options), eos_tokens=[5]) == [token]


def packed(is_allowed):
    words = [0] * math.ceil(len(is_allowed) / 32)
    for token, is_in in enumerate(is_allowed.tolist()):
        words[token // 32] |= is_in << token % 32
    return torch.tensor([word - 2**32 if word >= 2**31 else word for word in words]).int()


@pytest.mark.parametrize("kind", ["bool", "packed", "both"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_come(kind, temperature):
    masks = torch.rand(20, VOCAB) < 0.1
    masks[:, 31] = True  # a word's sign bit
    given = list(masks)
    if kind != "bool":
        given[::2] = [packed(mask) for mask in given[::2]]
    if kind == "packed":
        given[1::2] = [packed(mask) for mask in given[1::2]]
    rows = [row(i, allowed=mask, temperature=temperature) for i, mask in enumerate(given)]
    logits = torch.randn(20, VOCAB)
    tokens = draw(logits, *rows)
    assert all(mask[token] for mask, token in zip(masks, tokens, strict=True))
    if temperature == 0:
        assert tokens == logits.masked_fill(~masks, -INF).argmax(dim=-1).tolist()


def test_tokens_behind_the_end_of_a_mask_are_forbidden():
    logits = torch.arange(VOCAB).float()[None]
    for mask in (torch.ones(32, dtype=torch.bool), torch.full((1,), -1, dtype=torch.int32)):
        assert draw(logits, row(temperature=0.0, allowed=mask)) == [31]
    long = torch.ones(4 * VOCAB, dtype=torch.bool)
    assert draw(logits, row(temperature=0.0, allowed=long)) == [VOCAB - 1]


def test_top_k_keeps_the_best_and_what_equals_the_last_of_them():
    logits = [1.0, 4.0, 2.0, 3.0, 2.0]
    assert support(logits, top_k=1) == {1}
    assert support(logits, top_k=2) == {1, 3}
    assert support(logits, top_k=3) == {1, 2, 3, 4}
    assert support(logits, top_k=99) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert support(logits, top_p=0.4) == {1}
    assert support(logits, top_p=0.51) == {1, 3}
    assert support(logits, top_p=0.8) == {1, 2, 3}
    assert support(logits, top_p=0.95) == {0, 1, 2, 3}
    assert support(logits, top_p=1e-9) == {1}


def test_top_p_is_of_what_top_k_leaves():
    # Of the best two, 0.5 and 0.25, the first has two thirds.
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert support(logits, top_k=2, top_p=0.66) == {1}
    assert support(logits, top_k=2, top_p=0.68) == {1, 3}
    assert support(logits, top_k=3, top_p=0.6) == {1, 3}


def test_min_p_is_relative_to_the_likeliest():
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert support(logits, min_p=0.0) == {0, 1, 2, 3}
    assert support(logits, min_p=0.25) == {1, 2, 3}
    assert support(logits, min_p=0.4) == {1, 3}
    assert support(logits, min_p=1.0) == {1}


def test_cuts_come_after_temperature():
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert support(logits, min_p=0.4, temperature=2.0) == {0, 1, 2, 3}
    assert support(logits, top_p=0.51, temperature=0.3) == {1}


def test_a_masked_token_is_not_brought_back_by_a_cut():
    logits = [-INF, 1.0, -INF, 0.0]
    for cut in ({"top_k": 4}, {"top_k": 3, "top_p": 0.999999}, {"top_p": 0.999999}):
        assert support(logits, **cut) == {1, 3}


def test_extreme_temperatures():
    logits = [0.0, 1.0, -INF, 1e4]
    assert support(logits, temperature=1e-300) == {3}
    assert support(logits, temperature=1e300) == {0, 1, 3}


def mix(value):
    """splitmix64's, with Python's integers."""
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        value %= 2**64
        value = (value ^ value >> shift) * multiplier
    return value % 2**64


def draw_key(seed, position):
    return mix(mix(seed + GOLDEN) + position * GOLDEN)


def hashed(key, token):
    """v as the module's text says it, with Python's integers."""
    return (mix(key + (token + 1) * GOLDEN) % 2**63) / 2**63


def test_the_uniform_numbers_are_those_of_the_text():
    # splitmix64's first numbers from the seed 1234567, as its authors print them.
    first = [mix(1234567 + step * GOLDEN) for step in (1, 2, 3)]
    assert first == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    sampler = Sampler(VOCAB, "cpu")
    places = [(seed, position) for seed in (0, -1, -(2**63), 2**63 - 1) for position in (0, 1, 9)]
    keys = [draw_key(*place) for place in places]
    assert len(set(keys)) == len(keys)
    made = _draw_keys([row(seed, output=[0] * position) for seed, position in places])
    assert [key % 2**64 for key in made.tolist()] == keys
    found = sampler._uniform(made).tolist()
    expected = [[hashed(key, token) for token in range(VOCAB)] for key in keys]
    assert found == expected


def chi_square(counts, expected):
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("of", ["tokens", "seeds", "positions"])
def test_the_uniform_numbers_are_uniform(of):
    num_keys = 1 if of == "tokens" else 2000
    keys = {
        "tokens": lambda i: draw_key(3, 4),
        "seeds": lambda i: draw_key(i, 0),
        "positions": lambda i: draw_key(0, i),
    }[of]
    sampler = Sampler(200_000 if of == "tokens" else 100, "cpu")
    signed = [keys(i) - (2**64 if keys(i) >= 2**63 else 0) for i in range(num_keys)]
    values = sampler._uniform(torch.tensor(signed))
    bins = torch.histc(values, 256, 0, 1)
    # 255 degrees of freedom: mean 255, deviation 22.6.
    assert 255 - 5 * 22.6 < chi_square(bins, values.numel() / 256) < 255 + 5 * 22.6
    # Neighbours, in tokens and in keys, know nothing of each other.
    for first, second in [(values[:, :-1], values[:, 1:]), (values[:-1], values[1:])]:
        if first.numel():
            pairs = torch.stack([first.flatten(), second.flatten()])
            assert abs(torch.corrcoef(pairs)[0, 1]) < 5 / math.sqrt(first.numel())
            cells = (first * 16).long() * 16 + (second * 16).long()
            counts = torch.bincount(cells.flatten(), minlength=256).double()
            assert 255 - 5 * 22.6 < chi_square(counts, first.numel() / 256) < 255 + 5 * 22.6


@pytest.mark.parametrize("of", ["seed", "position"])
def test_frequencies_are_probabilities(of):
    num_draws = 20_000
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.08, 0.019, 0.001])
    logits = (probabilities.log() * 0.7 + 3).expand(num_draws, -1)
    rows = [
        row(i if of == "seed" else 5, output=range(0 if of == "seed" else i), temperature=0.7)
        for i in range(num_draws)
    ]
    tokens = torch.tensor(draw(logits, *rows, vocab_size=6))
    counts = torch.bincount(tokens, minlength=6).double()
    # 5 degrees of freedom: 25.7 has a probability of 1e-4.
    assert chi_square(counts, probabilities.double() * num_draws) < 25.7


def test_rare_tokens_are_as_rare_as_they_should_be():
    # One token of a half, the rest shared by 100,000: all of it lies in the tail of the noise.
    vocab_size, num_draws = 100_001, 400
    logits = torch.zeros(1, vocab_size)
    logits[0, 0] = math.log(vocab_size - 1)
    rows = [row(seed) for seed in range(num_draws)]
    tokens = draw(logits.expand(num_draws, -1), *rows, vocab_size=vocab_size)
    num_first = tokens.count(0)
    assert abs(num_first - num_draws / 2) < 4 * math.sqrt(num_draws) / 2
    assert len(set(tokens)) > num_draws - num_first - 5


def random_rows(num_rows, generator):
    """Rows with all kinds of options."""
    choices = {
        "temperature": [0.0, 0.5, 1.0],
        "top_k": [0, 0, 1, 5, 40],
        "top_p": [1.0, 0.5, 0.9],
        "min_p": [0.0, 0.0, 0.1],
        "presence_penalty": [0.0, 0.0, 1.0],
        "frequency_penalty": [0.0, 0.0, 0.5],
        "repetition_penalty": [1.0, 1.0, 1.3],
        "logit_bias": [(), (), ((4, 3.0), (49, -100)), tuple((i, i / 9) for i in range(30))],
        "min_tokens": [0, 8],
        "logprobs": [None, None, 0, 3, 20],
    }
    rows = []
    for index in range(num_rows):
        sampling = {name: generator.choice(values) for name, values in choices.items()}
        prompt = tuple(generator.choices(range(VOCAB), k=generator.randrange(6)))
        output = generator.choices(range(VOCAB), k=generator.randrange(12))
        mask = torch.rand(VOCAB) < 0.5 if generator.random() < 0.3 else None
        rows.append(row(index, prompt, output, mask, **sampling))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_never_notices_the_others(dtype):
    generator = random.Random(0)
    num_rows = 60
    rows = random_rows(num_rows, generator)
    logits = (torch.randn(num_rows, VOCAB) * 2).to(dtype)
    sampler = Sampler(VOCAB, "cpu", eos_tokens=[3])
    alone = [sampler.sample(logits[i : i + 1], [rows[i]])[0] for i in range(num_rows)]
    for _ in range(5):
        some = generator.sample(range(num_rows), generator.randrange(1, num_rows))
        found = sampler.sample(logits[some], [rows[i] for i in some])
        assert [one.token for one in found] == [alone[i].token for i in some]
        for one, i in zip(found, some, strict=True):
            assert (one.logprobs is None) == (rows[i].sampling.logprobs is None)
            if one.logprobs is not None:
                assert [token for token, _ in one.logprobs.top] == [
                    token for token, _ in alone[i].logprobs.top
                ]
                assert one.logprobs.logprob == pytest.approx(alone[i].logprobs.logprob, abs=1e-6)
    assert len({one.token for one in alone}) > 10


def test_logits_are_left_as_they_were():
    rows = random_rows(30, random.Random(1))
    logits = torch.randn(30, VOCAB)
    before = logits.clone()
    Sampler(VOCAB, "cpu").sample(logits, rows)
    assert torch.equal(logits, before)


def test_logprobs_are_the_models_own():
    logits = torch.tensor([[1.0, 3.0, 3.0, -INF, 0.0]])
    expected = logits.double().log_softmax(dim=-1)[0].tolist()
    options = {"temperature": 0.0, "presence_penalty": 2.0, "output": [1, 2]}
    sampler = Sampler(5, "cpu")
    for num_top in (0, 1, 3, 20):
        (one,) = sampler.sample(logits, [row(logprobs=num_top, **options)])
        assert one.token == one.logprobs.token == 0  # all three have 1 now, after the penalty
        assert one.logprobs.logprob == pytest.approx(expected[one.token], abs=1e-6)
        # The lower of equals first, and nothing that cannot come.
        assert [token for token, _ in one.logprobs.top] == [1, 2, 0, 4][:num_top]
        for token, logprob in one.logprobs.top:
            assert logprob == pytest.approx(expected[token], abs=1e-6)


def test_rows_that_cannot_be_drawn_from_fail_alone():
    logits = torch.zeros(7, VOCAB)
    logits[:, 4] = 1
    logits[1, 9] = math.nan
    logits[2, :] = -INF
    logits[3, 9] = INF
    none = torch.zeros(VOCAB, dtype=torch.bool)
    without_nan = ~none
    without_nan[9] = False
    rows = [row(temperature=0.0)] * 7
    rows[4] = row(temperature=0.0, allowed=none, logprobs=2)
    for first in (row(logprobs=2), row(top_k=2, top_p=0.5), row(allowed=without_nan)):
        rows[1] = rows[2] = rows[3] = first
        found = Sampler(VOCAB, "cpu").sample(logits, rows)
        assert [found[i] for i in (0, 5, 6)] == [Sampled(4)] * 3
        assert all(isinstance(found[i], str) for i in (1, 2, 3, 4))
        assert found[1].startswith("expected logits that are finite or -inf")
        assert found[4].startswith("no token is left")


def test_everything_is_queued_before_anything_is_read():
    # A tensor on "meta" has no values: whatever reads one raises.
    sampler = Sampler(VOCAB, "meta", eos_tokens=[3])
    rows = random_rows(40, random.Random(2))
    queued = sampler._enqueue(torch.empty(40, VOCAB, device="meta"), rows)
    asking = sum(one.sampling.logprobs is not None for one in rows)
    assert queued.shape == (2 * 40 + asking * (1 + 2 * 20),)
    with pytest.raises(NotImplementedError):
        queued.tolist()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.gpu
def test_a_gpu_draws_what_a_cpu_draws_and_is_read_once():
    vocab_size, num_rows = 20_000, 64
    rows = [row(i, output=[1] * i, top_p=0.9 if i % 2 else 1.0) for i in range(num_rows)]
    rows[3] = row(3, temperature=0.0, logprobs=5, repetition_penalty=1.2, prompt=(5, 6))
    rows[5] = row(5, logit_bias=tuple((token, token % 7 - 3) for token in range(300)))
    logits = torch.randn(num_rows, vocab_size)
    on_cpu, on_gpu = Sampler(vocab_size, "cpu"), Sampler(vocab_size, "cuda")
    keys = torch.arange(-5, 5) * 2**59
    assert torch.equal(on_cpu._uniform(keys), on_gpu._uniform(keys.cuda()).cpu())
    moved = logits.cuda()
    expected = [one.token for one in on_cpu.sample(logits, rows)]
    assert [one.token for one in on_gpu.sample(moved, rows)] == expected
    torch.cuda.set_sync_debug_mode("error")
    try:
        queued = on_gpu._enqueue(moved, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert queued[:num_rows].tolist() == expected


@pytest.mark.gpu
def test_a_gpu_takes_the_first_of_equals():
    logits = torch.zeros(64, 150_000, device="cuda", dtype=torch.bfloat16)
    logits[:, 77_777] = logits[:, 88_888] = 1
    sampled = Sampler(150_000, "cuda").sample(logits, [row(temperature=0.0)] * 64)
    assert {one.token for one in sampled} == {77_777}
