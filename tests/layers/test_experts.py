"""Fp8ExpertLinear and run_experts: what experts compute, in FP8 and beside plain ones."""

import pytest
import torch

from octavo import CheckpointError, ConfigError
from octavo.layers.experts import Fp8ExpertLinear, route, run_experts
from octavo.numerics.error import relative_rms
from octavo.recipe import LinearSettings
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

NUM_EXPERTS, HIDDEN, INNER = 5, 48, 33
SETTINGS = {
    "channel": LinearSettings(),
    "tensor": LinearSettings(weight="tensor"),
    "block": LinearSettings(weight="block 128x128"),
    "weights alone": LinearSettings(activation=None),
}
# Of normal values in e4m3 (docs/explanation/numerics.md): a weight alone, and both operands.
ERRORS = {"weights alone": 0.027}


def swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def make(settings, *, seed=0, device="cpu", dtype=torch.bfloat16):
    draw = Draw(seed, device)
    plain = {
        "up": draw.normal(NUM_EXPERTS, 2 * INNER, HIDDEN, dtype=dtype) / HIDDEN**0.5,
        "down": draw.normal(NUM_EXPERTS, HIDDEN, INNER, dtype=dtype) / INNER**0.5,
    }
    parts = (slice(0, INNER), slice(INNER, None))
    return plain, {
        "up": Fp8ExpertLinear.from_weight(plain["up"], settings, parts=parts),
        "down": Fp8ExpertLinear.from_weight(plain["down"], settings),
    }


def inputs(num_tokens, top_k, *, device="cpu", dtype=torch.bfloat16):
    draw = Draw(7, device)
    x = draw.normal(num_tokens, HIDDEN, dtype=dtype)
    index = torch.stack([draw.permutation(NUM_EXPERTS)[:top_k] for _ in range(num_tokens)])
    weights = draw.normal(num_tokens, top_k).softmax(dim=-1)
    return x, index, weights


def in_float64(x, index, weights, up, down, activate=swiglu):
    """Token by token, in float64."""
    results = []
    for token, experts, counts in zip(x.double(), index.tolist(), weights.double(), strict=True):
        each = [down[one].double() @ activate(up[one].double() @ token) for one in experts]
        results.append((torch.stack(each) * counts.unsqueeze(-1)).sum(0))
    return torch.stack(results)


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_routing(num_tokens, top_k):
    _, index, _ = inputs(num_tokens, top_k)
    routing = route(index, NUM_EXPERTS)
    begins = [0, *routing.ends.tolist()]
    assert routing.ends.dtype == torch.int32 and begins[-1] == num_tokens * top_k
    for expert in range(NUM_EXPERTS):
        rows = range(begins[expert], begins[expert + 1])
        assert [expert in index[t] for t in routing.tokens[list(rows)]] == [True] * len(rows)
        for token, slot in (index == expert).nonzero().tolist():
            assert int(routing.places[token, slot]) in rows
            assert routing.tokens[routing.places[token, slot]] == token


def test_rows_of_no_expert_come_last():
    routing = route(torch.tensor([[5, 1], [0, 7]]), 3)
    assert routing.ends.tolist() == [1, 2, 2] and routing.tokens.tolist() == [1, 0, 0, 1]
    assert route(torch.zeros(0, 2, dtype=torch.int64), 3).ends.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_experts(kind, top_k, num_tokens):
    """Two products in a row: each is off by what its operands in e4m3 are."""
    plain, layers = make(SETTINGS[kind])
    x, index, weights = inputs(num_tokens, top_k)
    out = run_experts(x, index, weights, **layers, activate=swiglu)
    assert out.dtype == x.dtype and out.shape == x.shape
    truth = in_float64(x, index, weights, **plain)
    one = ERRORS.get(kind, 0.038)  # of one product; gate and up are two factors
    assert 0 < relative_rms(out, truth) < 2 * 3**0.5 * one
    exact = in_float64(x, index, weights, layers["up"].dequantize(), layers["down"].dequantize())
    limit = 0.01 if kind == "weights alone" else 2 * 3**0.5 * 0.027
    assert relative_rms(out, exact) < limit  # of activations alone, and of bfloat16


def test_no_tokens():
    _, layers = make(SETTINGS["channel"])
    out = run_experts(*inputs(4, 2), **layers, activate=swiglu)
    none = run_experts(*(x[:0] for x in inputs(4, 2)), **layers, activate=swiglu)
    assert none.shape == (0, HIDDEN) and out.shape == (4, HIDDEN)


def test_biases_and_a_norm():
    _, layers = make(SETTINGS["weights alone"], dtype=torch.float32)
    x, index, weights = inputs(9, 2, dtype=torch.float32)
    draw = Draw(3)
    biases = draw.normal(NUM_EXPERTS, 2 * INNER), draw.normal(NUM_EXPERTS, HIDDEN)
    out = run_experts(
        *(x, index, weights),
        **layers,
        activate=swiglu,
        up_bias=biases[0],
        down_bias=biases[1],
        norm=lambda rows: rows * 2,
    )
    up, down = layers["up"].dequantize(), layers["down"].dequantize()
    for token in range(9):
        expected = 0
        for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
            inner = swiglu(up[expert] @ x[token] + biases[0][expert])
            expected = expected + 2 * weight * (down[expert] @ inner + biases[1][expert])
        torch.testing.assert_close(out[token], expected, rtol=1e-5, atol=1e-5)


def test_each_part_of_a_weight_has_its_own_scale_per_tensor():
    """The up half is a thousand times the gate: with one scale, the gate would be rounded off."""
    weight = Draw(0).normal(2, 8, 16)
    weight[:, 4:] *= 1000
    parts = (slice(0, 4), slice(4, None))
    made = Fp8ExpertLinear.from_weight(weight, SETTINGS["tensor"], parts=parts)
    assert made.weight_scale.unique().numel() == 4  # two experts with two parts
    assert relative_rms(made.dequantize()[:, :4], weight[:, :4]) < 0.03


def test_transposed_weights_are_the_same():
    weight = Draw(0).normal(3, 10, 20)
    made = Fp8ExpertLinear.from_weight(weight, SETTINGS["channel"])
    turned = weight.transpose(1, 2).contiguous()
    other = Fp8ExpertLinear.from_weight(turned, SETTINGS["channel"], is_transposed=True)
    for name, x in made.state_dict().items():
        assert_same_bits(other.state_dict()[name], x)


@pytest.mark.parametrize("kind", SETTINGS)
def test_state_dicts(kind):
    _, layers = make(SETTINGS[kind])
    made = layers["up"].to(torch.float16)  # the buffers keep their bits
    other = Fp8ExpertLinear((NUM_EXPERTS, 2 * INNER, HIDDEN), SETTINGS[kind])
    other.load_state_dict(made.state_dict())
    for name, x in made.state_dict().items():
        assert_same_bits(other.state_dict()[name], x)
    taken = Fp8ExpertLinear((NUM_EXPERTS, 2 * INNER, HIDDEN), SETTINGS[kind], device="meta")
    taken.take_(made.state_dict())
    assert taken.weight is not None and not taken.weight.is_meta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(5, 66, 48)}, "weight: expected torch.float8_e4m3fn .*got torch.flo"),
        ({"weight_scale": torch.ones(5, 1)}, r"weight_scale: expected torch.float32 \[5, 66\]"),
        ({"weight_scale": torch.zeros(5, 66)}, "positive finite scales"),
    ],
)
def test_state_dicts_that_do_not_fit(changes, message):
    made = make(SETTINGS["channel"])[1]["up"]
    state = made.state_dict() | changes
    with pytest.raises(RuntimeError, match=message):
        made.load_state_dict(state)
    with pytest.raises(CheckpointError, match=message):
        made.take_(state)


def test_a_static_scale():
    settings = LinearSettings(scaling="static")
    made = Fp8ExpertLinear.from_weight(Draw(0).normal(2, 8, 16), settings)
    made.take_({"input_scale": torch.tensor(0.01)})
    x, routing = Draw(1).normal(3, 16), route(torch.tensor([[0], [1], [1]]), 2)
    out = made(x, routing, is_sorted=False)
    quantized = (x / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.01
    expected = torch.stack([made.dequantize()[e] @ quantized[t] for t, e in enumerate((0, 1, 1))])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_experts():
    with pytest.raises(ConfigError, match="expected a finite weight, got 1 NaN or Inf"):
        Fp8ExpertLinear.from_weight(torch.full((1, 1, 1), torch.nan), LinearSettings(), name="moe")
    with pytest.raises(ConfigError, match="expected sizes from 1 on"):
        Fp8ExpertLinear((0, 1, 1), LinearSettings())
    _, layers = make(SETTINGS["channel"])
    x, index, weights = inputs(4, 2)
    with pytest.raises(ConfigError, match=r"expected x \[\.\.\., 48\], got \[4, 47\]"):
        run_experts(x[:, 1:], index, weights, **layers, activate=swiglu)
    with pytest.raises(ConfigError, match=r"index and weights \[4, top k\]"):
        run_experts(x, index, weights[:, :1], **layers, activate=swiglu)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_experts_on_a_gpu(kind, num_tokens):
    """As on the CPU, but for the order of sums; replayed from a CUDA graph, for another routing."""
    _, layers = make(SETTINGS[kind])
    ours = {name: layer.cuda() for name, layer in make(SETTINGS[kind])[1].items()}
    x, index, weights = (one.cuda() for one in inputs(num_tokens, 3))

    def call():
        return run_experts(x, index, weights, **ours, activate=swiglu)

    with torch.no_grad():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
    for shift in (0, 1):
        index.copy_((index + shift) % NUM_EXPERTS)
        graph.replay()
        cpu = (one.cpu() for one in (x, index, weights))
        expected = run_experts(*cpu, **layers, activate=swiglu)
        # A sum in another order may round an intermediate to another e4m3 number.
        assert relative_rms(out.cpu(), expected) < 0.01
