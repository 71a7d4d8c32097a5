"""Whole towers by token budget: padding changes no result and no history."""

import gc
import re
import weakref
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from octavo import Recipe
from octavo.calibration.autosave import savers_of
from octavo.calibration.scale_file import load_scales
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.apply import apply_, restore_
from octavo.integrations.transformers import vision_graphs
from octavo.integrations.transformers.calibrate import autosave
from octavo.integrations.transformers.vision_graphs import Plan, VisionGraphs, powers_of_two
from octavo.integrations.transformers.vision_tower import make_pixels, make_tower, twin
from octavo.kernels.device import Device
from octavo.layers.encoder_attention import EncoderAttention
from octavo.layers.scaling import DynamicScaling
from octavo.numerics.error import relative_rms
from octavo.testing.asserts import assert_same_bits

pytest.importorskip("transformers")

CPU = torch.device("cpu")
BUDGETS = (64, 128, 256)
# 16, 64 (a whole budget), 40 + 24, 2 + …, and 240 tokens of the tiny tower.
REQUESTS = [
    [(256, 256)],
    [(512, 512)],
    [(640, 256), (384, 256)],
    [(128, 128), (512, 640), (128, 256)],
    [(720, 1280)],
]
STATIC = {f"blocks.{i}.attn": {"q": 0.02, "k": 0.02, "v": 0.01} for i in range(2)}
RECIPES = {
    "dynamic": Recipe(vision_attention="fp8"),
    "per head": Recipe(vision_attention={"granularity": "head"}),
    "skipped": Recipe(vision_attention="fp8", skip_layers=["0"]),
    "static": Recipe(vision_attention={"scaling": "static"}, scales=STATIC),
    "bf16": Recipe(vision_attention="bf16"),
}


@pytest.fixture(scope="module")
def tower():
    made = make_tower("tiny", CPU).module
    for block in made.blocks:  # zeros would hide what padding does through a bias
        torch.nn.init.normal_(block.attn.qkv.bias, std=50.0)
    return made


@torch.no_grad()
def eager(tower, inputs):
    return tower(**inputs)


def histories(tower):
    layers = [(n, m) for n, m in tower.named_modules() if isinstance(m, EncoderAttention)]
    return {f"{n}.{k}": v.clone() for n, m in layers for k, v in m.named_buffers()}


def assert_same_result(actual, expected):
    assert_same_bits(actual.last_hidden_state, expected.last_hidden_state)
    assert_same_bits(actual.pooler_output, expected.pooler_output)
    assert len(actual.deepstack_features) == len(expected.deepstack_features)
    for one, other in zip(actual.deepstack_features, expected.deepstack_features, strict=True):
        assert_same_bits(one, other)


def assert_same_histories(one, other):
    ours, theirs = histories(one), histories(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert_same_bits(value, theirs[name])


@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_changes_nothing(tower, recipe):
    """Bits of results and histories are those of calls without padding, request after request."""
    plain, padded = twin(tower), twin(tower)
    apply_(plain, RECIPES[recipe])
    apply_(padded, RECIPES[recipe])
    graphs = VisionGraphs(padded, BUDGETS, max_sequences=4)
    for seed, sizes in enumerate(REQUESTS):
        inputs = make_pixels(tower, sizes, seed=seed)
        result = graphs.run_padded(**inputs)
        assert_same_result(result, eager(plain, inputs))
        assert_same_histories(padded, plain)
        assert len(result.deepstack_features) == 1
    if recipe == "dynamic":
        passes = [v for n, v in histories(padded).items() if n.endswith("num_passes")]
        assert all(v == len(REQUESTS) for v in passes)


def ignore_padding(monkeypatch):
    """Take away what keeps padding out of dynamic scales."""
    quantize = DynamicScaling.quantize
    monkeypatch.setattr(
        DynamicScaling,
        "quantize",
        lambda self, qkv, *, num_tokens, **options: quantize(self, qkv, num_tokens=None, **options),
    )


@pytest.mark.parametrize("is_kept_out", [True, False])
def test_padding_holds_nothing_that_matters(tower, is_kept_out, monkeypatch):
    """NaN in the rows of padding reaches no image, and no history unless it is looked at.

    In float32: torch's BF16 products on CPUs with AMX let NaN of one row into others. What float32
    products add up first depends on the number of rows, so both towers get as many.
    """
    wide = deepcopy(tower).float()
    zeros, nans = twin(wide), twin(wide)
    if not is_kept_out:
        ignore_padding(monkeypatch)
    inputs, results = make_pixels(wide, REQUESTS[0]), []
    for other, value in ((zeros, 0.0), (nans, float("nan"))):
        apply_(other, RECIPES["dynamic"])
        graphs = VisionGraphs(other, BUDGETS)
        request = graphs._padded(**inputs, budget=64)
        request["hidden_states"][16:] = value
        with torch.no_grad():
            results.append(graphs._cut(graphs._forward(request, 64), 16, 64, is_copied=False))
    if is_kept_out:
        assert_same_result(*results)
        assert_same_histories(nans, zeros)
    else:
        with pytest.raises(pytest.fail.Exception, match="elements differ"):
            assert_same_histories(nans, zeros)


def test_zeros_are_no_harmless_padding(tower, monkeypatch):
    """Why padding is kept out: through a bias, patches of zeros have values that raise an amax."""
    plain, padded = twin(tower), twin(tower)
    for other in (plain, padded):
        # A bias that only counts where a patch is zero: normalised images are far from it.
        norm = other.blocks[0].norm1
        other.blocks[0].norm1 = norm_of_zeros = torch.nn.Module()
        norm_of_zeros.forward = lambda x, norm=norm: torch.where(
            (x == 0).all(-1, keepdim=True), 100.0, norm(x).float()
        ).to(x.dtype)
        torch.nn.init.zeros_(other.patch_embed.proj.bias)
        apply_(other, RECIPES["dynamic"])
    inputs = make_pixels(tower, REQUESTS[0])
    eager(plain, inputs)
    VisionGraphs(padded, BUDGETS).run_padded(**inputs)
    assert_same_histories(padded, plain)
    eager(plain, inputs)
    ignore_padding(monkeypatch)
    VisionGraphs(padded, BUDGETS).run_padded(**inputs)
    with pytest.raises(pytest.fail.Exception, match="elements differ"):
        assert_same_histories(padded, plain)


def test_plans_and_their_reasons(tower):
    other = twin(tower)
    graphs = VisionGraphs(other, BUDGETS, max_sequences=2)
    small, large = (make_pixels(tower, [size]) for size in ((128, 128), (1080, 1920)))
    many = make_pixels(tower, [(128, 128)] * 3)
    assert "attention 'sdpa' asks the device" in graphs.plan(small["grid_thw"]).reason
    with pytest.raises(UnsupportedError, match="apply_ a recipe"):
        graphs.run_padded(**small)
    apply_(other, RECIPES["static"])
    assert (
        graphs.plan(small["grid_thw"]).reason == "CUDA graphs need a CUDA GPU, got a tower on cpu"
    )
    assert "more than the largest budget, 256" in graphs.plan(large["grid_thw"]).reason
    assert "3 sequences are more than max_sequences 2" in graphs.plan(many["grid_thw"]).reason
    with pytest.raises(UnsupportedError, match="more than the largest budget"):
        graphs(**large, is_required=True)
    assert_same_result(graphs(**large), eager(other, large))
    empty = {"hidden_states": small["hidden_states"][:0], "grid_thw": small["grid_thw"][:0]}
    assert graphs.plan(empty["grid_thw"]).reason == "the request has no tokens"
    video = torch.tensor([[2, 2, 4]])  # two frames are two sequences
    assert vision_graphs._cu_seqlens(video) == [0, 8, 16]
    assert graphs._padding_plan(video).budget == 64


def test_where_the_reference_quantizes_there_are_no_graphs_for_fp8(tower, monkeypatch):
    """As on sm_86, which has no kernel for it: told at the start, not by a capture that fails."""
    names = vision_graphs.explain_op.__globals__
    monkeypatch.setattr(VisionGraphs, "_padding_plan", lambda *_: Plan(64, "it fits"))
    message = "the reference quantizes, which waits for the device: .* got 8.6"
    for recipe, capability, is_refused in (
        ("dynamic", (8, 6), True),
        ("static", (8, 6), True),
        ("bf16", (8, 6), False),
        ("dynamic", (8, 9), False),
    ):
        gpu = Device("cuda", "a GPU", capability)
        monkeypatch.setitem(names, "describe", lambda device, gpu=gpu: gpu)
        other = twin(tower)
        apply_(other, RECIPES[recipe])
        graphs = VisionGraphs(other, BUDGETS)
        first = SimpleNamespace(device=torch.device("cuda"))
        monkeypatch.setattr(other, "parameters", lambda first=first: iter([first]))
        plan = graphs.plan(torch.tensor([[1, 4, 4]]))
        assert plan.budget == (None if is_refused else 64)
        assert bool(re.search(message, plan.reason)) == is_refused


def test_what_is_refused(tower):
    with pytest.raises(UnsupportedError, match="expected a vision tower, one of .* got Linear"):
        VisionGraphs(torch.nn.Linear(2, 2), BUDGETS)
    with pytest.raises(ConfigError, match=r"multiples of 4 tokens.* got \[63\]"):
        VisionGraphs(tower, [64, 63])
    with pytest.raises(ConfigError, match="got none"):
        VisionGraphs(tower, [])
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        VisionGraphs(tower, BUDGETS, max_sequences=0)
    other = twin(tower)
    apply_(other, RECIPES["static"])
    inputs = make_pixels(tower, REQUESTS[0])
    with pytest.raises(ConfigError, match="expected 16 rows of patches"):
        VisionGraphs(other, BUDGETS).run_padded(inputs["hidden_states"][:8], inputs["grid_thw"])
    with pytest.raises(ConfigError, match=r"expected grid_thw \[images, 3\]"):
        VisionGraphs(other, BUDGETS).plan(torch.zeros(3))
    restore_(other)


def test_powers_of_two():
    assert powers_of_two(1000) == (256, 512, 1024)
    assert powers_of_two(4, smallest=4) == (4,)
    with pytest.raises(ConfigError, match="expected 1 ≤ smallest ≤ largest"):
        powers_of_two(3, smallest=4)


class StandIn:
    """Replays as a graph does, on a CPU: the tower's work is done, and nobody is told."""

    def __init__(self, graphs, inputs, budget):
        self.forward = lambda: graphs._forward(inputs, budget)
        self.tower, self.result = graphs.tower, self.forward()

    def replay(self):
        hooks = dict(self.tower._forward_hooks)
        self.tower._forward_hooks.clear()
        new = self.forward()
        self.tower._forward_hooks.update(hooks)
        self.result.pooler_output.copy_(new.pooler_output)


def test_replays_count_for_who_saves_scales(tower, monkeypatch, tmp_path):
    """Warm-up and capture do not count, each replay does, and another tower's never do."""
    padded, other = twin(tower), twin(tower)
    apply_(padded, RECIPES["dynamic"])
    apply_(other, RECIPES["dynamic"])
    graphs = VisionGraphs(padded, BUDGETS)

    def capture(inputs, budget):
        static = {name: x.clone() for name, x in inputs.items()}
        with vision_graphs.history_kept(padded), vision_graphs.not_counted(padded):
            graph = StandIn(graphs, static, budget)
        return vision_graphs._Captured(graph, static, graph.result)

    monkeypatch.setattr(graphs, "plan", graphs._padding_plan)
    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(graphs, "_forget_if_changed", lambda: None)
    path, others = tmp_path / "scales.json", tmp_path / "others.json"
    saver, bystander = autosave(padded, path), autosave(other, others)
    for index in range(16):
        assert not path.exists() and saver._num_steps == index
        graphs(**make_pixels(tower, REQUESTS[index % 2], seed=index))
    assert saver.is_saved and load_scales(path).header.passes == 16
    assert bystander._num_steps == 0 and not others.exists()
    with pytest.raises(ConfigError, match="expected 16 passes"):
        bystander.close()
    assert savers_of(padded) == savers_of(other) == []
    graphs(**make_pixels(tower, REQUESTS[0]))  # saved: nobody counts any more
    assert saver._num_steps == 16


def test_graphs_are_forgotten_when_the_tower_changed(tower, monkeypatch):
    other = twin(tower)
    graphs = VisionGraphs(other, BUDGETS)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def is_forgotten():
        graphs._captured[64] = None
        graphs._forget_if_changed()
        return 64 not in graphs._captured

    apply_(other, RECIPES["dynamic"])
    assert is_forgotten() and not is_forgotten()
    for layer in (m for m in other.modules() if isinstance(m, EncoderAttention)):
        layer.impl = "reference"
        assert is_forgotten() and not is_forgotten()
    other.to(torch.float64)
    assert is_forgotten() and not is_forgotten()
    restore_(other)
    assert is_forgotten() and not is_forgotten()


def test_new_layers_at_old_addresses_are_noticed(tower, monkeypatch):
    """As after restore_ and apply_, where an allocator gives away again what was freed."""
    other = twin(tower)
    apply_(other, RECIPES["dynamic"])
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 0)
    before = vision_graphs._fingerprint(other)
    old = [weakref.ref(m) for m in other.modules() if isinstance(m, EncoderAttention)]
    assert vision_graphs._fingerprint(other) == before
    restore_(other)
    apply_(other, RECIPES["dynamic"])
    gc.collect()
    assert vision_graphs._fingerprint(other) != before
    assert len(old) == 2 and all(layer() is not None for layer in old)  # their memory is not free


def on_gpu():
    return make_tower("qwen3-vl-30b-a3b", torch.device("cuda"), num_layers=2).module


def batches(tower):
    """40 requests of one to four images of 64 to 768 pixels, and so of three budgets."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(40):
        num_images = int(torch.randint(1, 5, (), generator=generator))
        sizes = torch.randint(2, 25, (num_images, 2), generator=generator) * 32
        yield make_pixels(tower, [(int(h), int(w)) for h, w in sizes], seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_are_what_eager_calls_are(recipe):
    """40 different batches: bits of results and histories, against padded calls without a graph."""
    tower = on_gpu()
    plain, captured = twin(tower), twin(tower)
    apply_(plain, RECIPES[recipe])
    apply_(captured, RECIPES[recipe])
    budgets = powers_of_two(4 * 48 * 48)
    graphs = VisionGraphs(captured, budgets, max_sequences=4)
    reference = VisionGraphs(plain, budgets, max_sequences=4)
    for inputs in batches(tower):
        actual = graphs(**inputs, is_required=True)
        expected = reference.run_padded(**inputs)
        assert_same_result(actual, expected)
        assert_same_histories(captured, plain)
    assert len(graphs._captured) > 2


@pytest.mark.gpu
def test_replays_are_near_calls_without_padding():
    """Matrix products may add up in another order for another number of rows, no more than that."""
    tower = on_gpu()
    plain, captured = twin(tower), twin(tower)
    apply_(plain, RECIPES["dynamic"])
    apply_(captured, RECIPES["dynamic"])
    graphs = VisionGraphs(captured, powers_of_two(4 * 48 * 48), max_sequences=4)
    for inputs in batches(tower):
        actual = graphs(**inputs, is_required=True).pooler_output
        assert relative_rms(actual, eager(plain, inputs).pooler_output) < 0.05


@pytest.mark.gpu
def test_graphs_of_a_tower_that_was_changed():
    tower = on_gpu()
    graphs = VisionGraphs(tower, [4096])
    inputs = make_pixels(tower, [(256, 256)])
    apply_(tower, RECIPES["dynamic"])
    graphs(**inputs, is_required=True)
    first = graphs._captured[4096]
    graphs(**inputs, is_required=True)
    assert graphs._captured[4096] is first
    restore_(tower)
    apply_(tower, RECIPES["dynamic"])
    graphs(**inputs, is_required=True)
    assert graphs._captured[4096] is not first
    passes = [v for n, v in histories(tower).items() if n.endswith("num_passes")]
    assert passes and all(v == 1 for v in passes)
    second = graphs._captured[4096]
    for layer in (m for m in tower.modules() if isinstance(m, EncoderAttention)):
        layer.impl = "triton"
    graphs(**inputs, is_required=True)
    assert graphs._captured[4096] is not second


@pytest.mark.gpu
def test_scales_of_replays_are_saved(tmp_path):
    """A dynamic run by graphs saves after 16 requests what the same run without graphs would."""
    tower = on_gpu()
    plain, captured = twin(tower), twin(tower)
    apply_(plain, RECIPES["dynamic"])
    apply_(captured, RECIPES["dynamic"])
    budgets = powers_of_two(4 * 48 * 48)
    graphs = VisionGraphs(captured, budgets, max_sequences=4)
    reference = VisionGraphs(plain, budgets, max_sequences=4)
    by_graphs, eager_path = tmp_path / "graphs.json", tmp_path / "eager.json"
    savers = [autosave(captured, by_graphs), autosave(plain, eager_path)]
    for index, inputs in enumerate(batches(tower)):
        assert by_graphs.exists() == (index >= 16)
        graphs(**inputs, is_required=True)
        reference.run_padded(**inputs)
        if index == 16:
            break
    assert all(saver.is_saved for saver in savers)
    assert load_scales(by_graphs).header.passes == 16
    assert load_scales(by_graphs).layers == load_scales(eager_path).layers
