"""Hopper's attention kernel on a CPU, warps in random order: phases, copies, masks and sums."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from octavo.kernels.attention.config import GluonConfig, default_gluon, is_valid_gluon
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.granularity import PerHead
from octavo.reference.softmax import CODE_UNIT, TOP_CODE, codes
from octavo.testing.cases import AttentionCase, PackedCase
from octavo.testing.inputs import make_attention_inputs, make_packed_inputs
from octavo_testkit.kernels.attention_checks import E4M3, check, run

pytest.importorskip("triton")
from octavo_testkit.kernels.gluon_simulator import Simulator
from octavo_testkit.kernels.ptx_interpreter import run_ptx
from octavo_testkit.kernels.simulated_memory import SimulationError, as_registers

EXACT, CODES = AttentionSpec(exponentials="exact"), AttentionSpec(exponentials="codes")
ONE_LEVEL = {"promote_every": None}
HEADS = {"num_heads": 2, "num_kv_heads": 1}


def dense(q_len, kv_len, head_dim, spec, batch=1, **fields):
    case = AttentionCase(
        batch=batch, q_len=q_len, kv_len=kv_len, head_dim=head_dim, spec=spec, **HEADS, **fields
    )
    return make_attention_inputs(case, dtype=E4M3, granularity=PerHead())


def packed(q_lens, kv_lens, head_dim, spec, **fields):
    case = PackedCase(
        q_lens=q_lens, kv_lens=kv_lens, head_dim=head_dim, spec=spec, **HEADS, **fields
    )
    return make_packed_inputs(case, dtype=E4M3, granularity=PerHead())


def simulate(inputs, config=None, num_sms=2, simulator=None):
    simulator = simulator or Simulator()
    simulator.num_sms = num_sms
    # Products are exact here, and so are the sums of the model.
    return check(simulator.attention, inputs, config, accumulator=None)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [EXACT, CODES, replace(CODES, **ONE_LEVEL)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 136, 224])
def test_defaults(head_dim, spec):
    simulate(dense(130, 300, head_dim, spec))
    simulate(packed((70, 0, 5), (129, 7, 0), head_dim, replace(spec, causal=True), has_sinks=True))


CONFIGS = [
    (spec, GluonConfig(num_stages=stages, num_consumers=consumers, **how, **order))
    for spec, how in (
        (EXACT, {"block_n": 64}),
        (CODES, {"block_n": 64}),
    )
    for stages, consumers in ((2, 2), (4, 3))
    for order in ({}, {"is_persistent": True}, {"is_persistent": True, "is_longest_first": True})
]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "config"), CONFIGS, ids=str)
def test_settings(spec, config):
    """Tiles of keys: none, one, and more than there are stages; jobs: more than programs."""
    simulator = Simulator()
    for kv_len in (0, 1, 330):
        simulate(dense(200, kv_len, 64, spec), config, simulator=simulator)
    causal = replace(spec, causal=True)
    simulate(dense(300, 300, 64, causal), config, simulator=simulator)
    simulate(dense(200, 100, 64, causal), config, simulator=simulator)
    sequences = packed((130, 1, 0, 64), (300, 100, 7, 0), 64, causal, has_sinks=True)
    simulate(sequences, config, num_sms=3, simulator=simulator)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [EXACT, CODES], ids=str)
@pytest.mark.parametrize(
    "uses",
    [{"window": 40}, {"causal": True, "window": 170}, {"softcap": 3.0}],
    ids=str,
)
def test_what_hides_and_caps(spec, uses):
    simulate(dense(200, 330, 72, replace(spec, **uses)))


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("strength", [8, 12, 70])
def test_sinks_of_codes(strength, is_first):
    """A key far above the others, in the tile that comes first or last."""
    inputs = dense(64, 384, 64, CODES)
    inputs["k"] = inputs["k"].float()
    place = 300 if is_first else 5
    unit = float(64**0.5 / inputs["scales"].q.max() / inputs["scales"].k.max())
    inputs["q"] = (inputs["q"].float().abs() + 1).to(E4M3)
    mean = inputs["q"].float().mean()
    inputs["k"][:, place] = (strength * unit / 64 / mean).clamp(max=448)
    inputs["k"] = inputs["k"].to(E4M3)
    simulate(inputs)


@pytest.mark.parametrize("config", [GluonConfig(), GluonConfig(block_n=256)], ids=str)
@pytest.mark.parametrize("place", [2, 130, 255])
def test_nan_stays_nan(config, place):
    inputs = dense(70, 256, 64, CODES)
    inputs["k"].view(torch.uint8)[0, place, :, 3] = 0x7F
    for x in run(Simulator().attention, inputs, config):
        assert x.isnan().all()


def test_nan_stays_in_its_sequence():
    inputs = packed((20, 130, 5), (20, 130, 5), 72, CODES)
    for name in "kv":
        inputs[name].view(torch.uint8)[20:150] = 0x7F
    for x in run(Simulator().attention, inputs):
        assert x[20:150].isnan().all()
        assert x[:20].isfinite().all() and x[150:].isfinite().all()


@pytest.mark.parametrize("num_words", [4, 16])
def test_codes_are_the_references(num_words):
    """Bit for bit, for every code and what lies between, by both ways through the PTX."""
    ptx = Simulator().module_named("gluon_softmax")._codes_ptx(num_words)
    x = torch.cat([torch.linspace(-30, TOP_CODE, 32 * 400), torch.arange(-16, 240) / 2])
    special = torch.tensor([torch.nan, -torch.inf, -0.0, 0.0, TOP_CODE, 2.0**-20, -(2.0**30), 0.5])
    x = torch.cat([x.clamp(max=TOP_CODE), special.repeat(8)]).view(4, -1, num_words)
    four = (x * CODE_UNIT).unbind(0)

    # As octavo.reference.softmax.codes makes bytes of 8 · log2(p) + TOP_CODE.
    scaled = (x * CODE_UNIT).clamp(min=0).half()
    code = (scaled.double() / CODE_UNIT + 1024).half() - 1024
    by_code = torch.where(code.isnan(), 0x7F, code).to(torch.uint8)
    by_rounding = (2 ** ((x - TOP_CODE) / 8 + 8)).to(E4M3).view(torch.uint8)
    for votes, expected in ((0, by_code), (2, by_code), (3, by_rounding)):
        words = run_ptx(ptx, [*four, torch.full(four[0].shape, votes)], num_words)
        found = words.view(torch.uint8).view(*words.shape, 4).movedim(-1, 0)
        is_nan = x.isnan()
        assert ((found[is_nan] & 0x7F) == 0x7F).all()
        wrong = (found != expected) & ~is_nan
        # The last bit of an exponential may decide what lies in the middle of two numbers.
        assert int(wrong.sum()) <= (2 if votes == 3 else 0)


def test_what_lies_beyond_the_range_is_cut_off():
    """A tile's largest logit is rounded, so that others may lie a little above it."""
    ptx = Simulator().module_named("gluon_softmax")._codes_ptx(4)
    x = torch.tensor([125.9, 126.0, 127.0, 1e30] * 4).view(4, 1, 4) * CODE_UNIT
    words = run_ptx(ptx, [*x.unbind(0), torch.zeros(1, 4, dtype=torch.int64)], 4)
    assert (words.view(torch.uint8) == 126).all()


@pytest.mark.parametrize("has_sink", [False, True])
def test_weights_of_tiles_are_the_references(has_sink):
    """What P is relative to, which keys are rounded and the bytes, tile after tile."""
    softmax = Simulator().module_named("gluon_softmax")
    tiles = SimpleNamespace(
        BLOCK_N=128,
        HAS_CODES=True,
        HAS_ONES=True,
        HAS_SOFTCAP=False,
        s_layout=None,
        sum_layout=None,
    )
    factor = 0.37
    scaled = softmax.Logits(as_registers(torch.tensor(factor)), None, None)
    draws = 12 * torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(0))
    if has_sink:
        draws[0, ::3, 77] = torch.linspace(20, 300, 22)
    draws[1, :8] = -torch.inf
    draws[:, 8] = -torch.inf
    rows, num_wrong, num_rounded = softmax.begin_rows(tiles), 0, 0
    before, largest = torch.full((64,), -torch.inf), torch.full((64,), -torch.inf)
    for s in draws:
        rows, _, votes = softmax.refer(as_registers(s), rows, scaled, tiles)
        words, _ = softmax.encode(
            softmax.exponents(as_registers(s), rows, scaled, tiles), votes, None, None, tiles
        )
        found = softmax.as_operand(words, 128, None).as_subclass(torch.Tensor)

        top = s.amax(1)
        largest = torch.maximum(largest, top)
        reference = torch.maximum(top, largest - 64 / factor)
        reference = torch.where(top == -torch.inf, before, reference)
        assert torch.equal(rows.reference.as_subclass(torch.Tensor), reference)
        finite = torch.where(reference == -torch.inf, 0.0, reference)
        threads = s.view(64, 16, 4, 2).amax((1, 3))
        is_far = ((finite[:, None] - threads) * factor > 9).any(1)
        found_far = (votes & 1).bool().as_subclass(torch.Tensor)
        assert torch.equal(found_far, is_far[:, None].expand(64, 4))
        p = torch.exp2((s - finite[:, None]) * factor)
        by_code, by_rounding = codes(p).view(torch.uint8), (p * 256).to(E4M3).view(torch.uint8)
        expected = torch.where(is_far[:, None], by_rounding, by_code)
        # P's columns lie as transposed values do.
        expected = expected.view(64, 8, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(64, 128)
        different = (found.int() - expected.int()).abs()
        assert int(different.max()) <= 1
        num_wrong += int(different.sum())
        num_rounded += int(is_far.sum())
        before = reference
    # float32 rounds x on one way and P on the other: in the middle of two bytes they may differ.
    assert num_wrong <= 6
    assert num_rounded > 20 if has_sink else num_rounded < 20


MISTAKES = {
    "a stage is given back too early": (
        "gluon_roles",
        "_step_exactly",
        "before, _ = place_in_ring(base + j - 1, tiles.NUM_STAGES)",
        "before, _ = place_in_ring(base + j + 1, tiles.NUM_STAGES)",
    ),
    "a stage is never given back": (
        "gluon_roles",
        "_step_exactly",
        "mbarrier.arrive(shared.empty.index(before), count=1)",
        "pass",
    ),
    "fewer bytes are expected than come": (
        "gluon_roles",
        "_copy_job",
        "tiles.BLOCK_N * (tiles.E1 + tiles.E2_COPIED)",
        "tiles.BLOCK_N * tiles.E2_COPIED",
    ),
    "a phase is not turned": (
        "gluon_roles",
        "_copy_job",
        "mbarrier.wait(shared.q_free.index(slot), phase ^ 1)",
        "mbarrier.wait(shared.q_free.index(slot), phase)",
    ),
    "a turn is not passed": ("gluon_roles", "_step_exactly", "_pass_turn(j, tiles, W)", "pass"),
    "sums do not shrink": (
        "gluon_results",
        "shrunk",
        "return sums * ",
        "return sums + 0 * ",
    ),
    "a wait is for too few products": (
        "gluon_roles",
        "_end_values",
        "warpgroup_mma_wait(NUM_BEGUN,",
        "warpgroup_mma_wait(NUM_BEGUN + 1,",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_are_found(mistake):
    """What the simulator would not find, it could not rule out."""
    simulator = Simulator()
    simulator.change(*MISTAKES[mistake])
    config = GluonConfig(block_n=64, is_persistent=True)
    with pytest.raises((SimulationError, pytest.fail.Exception)):
        for _ in range(3):
            simulate(dense(300, 330, 80, EXACT, batch=2), config, simulator=simulator)


def test_all_defaults_have_room():
    for head_dim, spec, causal in itertools.product(
        range(64, 257), (EXACT, CODES, replace(CODES, **ONE_LEVEL)), (False, True)
    ):
        spec = replace(spec, causal=causal)
        assert is_valid_gluon(default_gluon(head_dim, spec), head_dim, spec)
