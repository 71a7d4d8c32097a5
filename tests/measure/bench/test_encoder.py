"""A whole vision tower, timed after it was checked."""

from pathlib import Path

import pytest
import torch

from octavo import ops
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.integrations.apply import apply_
from octavo.integrations.transformers import vision_tower
from octavo.integrations.transformers.vision_graphs import VisionGraphs
from octavo.integrations.transformers.vision_tower import (
    make_pixels,
    make_tower,
    open_tower,
    resized,
    twin,
)
from octavo.layers.encoder_attention import EncoderAttention
from octavo.measure.bench import encoder, peer_impls, timing
from octavo.measure.bench.cases import RESOLUTIONS
from octavo.measure.bench.encoder import (
    MAX_GRAPH_ERROR,
    EncoderCase,
    _use_fastest,
    run_encoder,
)
from octavo.numerics.attention import AttentionSpec
from octavo.ops.select import impl_names
from octavo.recipe import Recipe
from octavo.testing.asserts import assert_same_bits

pytest.importorskip("transformers")

CPU = torch.device("cpu")
SPEEDUPS = {"speedup", "fused_speedup"}


@pytest.fixture(scope="module")
def tower():
    return make_tower("tiny", CPU)


def test_tokens_of_qwen3_vl():
    """The table of vLLM's notes: rounded to 32 pixels, halves to even."""
    tokens = {}
    for name, size in RESOLUTIONS.items():
        height, width = resized(*size, 32)
        tokens[name] = height * width // 16**2
    assert tokens == {"hd": 3520, "fullhd": 8160, "qhd": 14400, "4k": 32640}
    assert resized(1, 1, 32) == (32, 32)


def test_configs_are_qwens():
    from transformers import AutoConfig

    for name, out in (("qwen3-vl-30b-a3b", 2048), ("qwen3-vl-8b", 4096)):
        model_type, sizes = vision_tower.CONFIGS[name]
        config = AutoConfig.for_model(model_type, **sizes)
        assert (config.depth, config.hidden_size, config.num_heads) == (27, 1152, 16)
        assert (config.intermediate_size, config.out_hidden_size) == (4304, out)
        assert list(config.deepstack_visual_indexes) == [8, 16, 24]


def test_all_recipes_side_by_side(tower):
    records, objections = run_encoder(tower, EncoderCase("hd", 1), "octavo bench encoder")
    assert not objections
    rows = {(record.impl, record.case["recipe"]): record for record in records}
    assert set(rows) == {
        *(("sdpa", "bf16"), ("octavo", "fused-bf16")),
        *(("octavo", "dynamic"), ("octavo", "static")),
    }
    for record in records:
        assert record.op == "encoder" and record.baseline == "transformers sdpa BF16"
        assert record.case["weights"] == "random" and record.case["graphs"] is False
        assert record.values["tokens"] == 240 and record.values["median_ms"] > 0
    stock, dynamic, static = (
        *(rows["sdpa", "bf16"], rows["octavo", "dynamic"], rows["octavo", "static"]),
    )
    assert stock.values["relative_rms"] == 0 and stock.values["speedup"] == 1
    fused = rows["octavo", "fused-bf16"].values
    assert fused["fused_speedup"] == 1
    assert fused["speedup"] == pytest.approx(stock.values["median_ms"] / fused["median_ms"])
    for record in records:
        expected = fused["median_ms"] / record.values["median_ms"]
        assert record.values["fused_speedup"] == pytest.approx(expected)
    assert 0 < fused["relative_rms"] < 0.01
    for fp8 in (dynamic, static):
        assert 0.01 < fp8.values["relative_rms"] < 0.07
        assert 0 < fp8.values["tower_relative_rms"] < 0.07


def test_wrong_attention_is_not_timed(tower, monkeypatch):
    """The planted failure: attention that gives zeros."""
    monkeypatch.setattr(
        EncoderAttention, "forward", lambda self, query, *_, **__: torch.zeros_like(query)
    )
    with pytest.raises(UnsupportedError, match="octavo, dynamic eagerly is wrong"):
        run_encoder(tower, EncoderCase("hd", 1), "x", recipes=["dynamic"])


class PaddedGraphs(VisionGraphs):
    """On a CPU, the padded pass of a budget instead of its graph; what it gives times `factor`."""

    factor = 1.0

    def plan(self, grid_thw):
        return self._padding_plan(grid_thw)

    def __call__(self, hidden_states, grid_thw, *, is_required=False):
        result = self.run_padded(hidden_states, grid_thw)
        result.pooler_output = result.pooler_output * self.factor
        return result


def enter(tower, recipe, monkeypatch, graphs):
    monkeypatch.setattr(encoder, "VisionGraphs", graphs)
    inputs = make_pixels(tower.module, [(720, 1280)])
    rows = encoder.encoder_rows([recipe])
    entries, _ = encoder._enter(tower, rows, inputs, None, ())
    checked, _ = encoder._check_all(entries, inputs, encoder._truth(tower, inputs), 1, True)
    return {one.is_graph: one.values for one in checked}, entries[0].tower


@pytest.mark.parametrize("recipe", ["fused-bf16", "dynamic", "static"])
@torch.no_grad()
def test_a_replay_is_compared_with_the_eager_tower(tower, recipe, monkeypatch):
    errors, checked = enter(tower, recipe, monkeypatch, PaddedGraphs)
    assert errors[True]["graph_relative_rms"] == 0 and "graph_relative_rms" not in errors[False]
    assert errors[True]["tower_relative_rms"] == errors[False]["tower_relative_rms"]
    # Stock's inputs and the checks' own passes are not in the scales that will be timed.
    layers = [m for m in checked.modules() if isinstance(m, EncoderAttention)]
    passes = [x for m in layers for n, x in m.named_buffers() if n.endswith("num_passes")]
    assert all(x == 1 for x in passes) and bool(passes) == (recipe == "dynamic")


@pytest.mark.parametrize("factor", [1.01, 0.0, float("nan")])
@pytest.mark.parametrize("recipe", ["fused-bf16", "dynamic"])
@torch.no_grad()
def test_a_wrong_replay_is_not_timed(tower, recipe, factor, monkeypatch):
    """The planted failure: finite, and nearer to stock than FP8's own budget for a layer."""
    wrong = type("Wrong", (PaddedGraphs,), {"factor": factor})
    with pytest.raises(UnsupportedError, match=f"octavo, {recipe} by graphs is wrong"):
        enter(tower, recipe, monkeypatch, wrong)


def test_without_a_stock_tower_there_is_no_speedup(tower):
    (record,), _ = run_encoder(tower, EncoderCase("hd", 1), "x", recipes=["dynamic"])
    assert record.baseline is None and record.values.keys().isdisjoint(SPEEDUPS)


def test_ours_in_bf16_is_a_baseline_of_its_own(tower):
    records, _ = run_encoder(tower, EncoderCase("hd", 1), "x", recipes=["fused-bf16", "dynamic"])
    assert [record.case["recipe"] for record in records] == ["fused-bf16", "dynamic"]
    assert all(record.values.keys() & SPEEDUPS == {"fused_speedup"} for record in records)


def test_wrong_attention_in_bf16_is_held_to_its_own_budget(tower, monkeypatch):
    """The planted failure: what FP8's budget would let pass."""
    forward = EncoderAttention.forward

    def blurred(self, *args, **options):
        return forward(self, *args, **options) * 1.03

    monkeypatch.setattr(EncoderAttention, "forward", blurred)
    with pytest.raises(UnsupportedError, match="octavo, fused-bf16 eagerly is wrong"):
        run_encoder(tower, EncoderCase("hd", 1), "x", recipes=["fused-bf16"])


def test_the_fastest_peer_attends_in_ours(tower, monkeypatch):
    """A peer that is there takes part by its name, in every layer; one that is not is left out."""
    seen = []

    def fast(folder, fp8, inputs):
        seen.append(folder)
        return lambda: ops.attention(*inputs.qkv, packing=inputs.packing, impl="reference")

    def missing(*_):
        raise UnsupportedError("vllm is not installed")

    monkeypatch.setattr(peer_impls, "PEERS", {"missing": missing, "fast": fast})
    monkeypatch.setattr(
        timing, "sample_in_turn_ms", lambda calls, *_, **__: [[2.0 / (i + 1)] for i in range(2)]
    )
    with peer_impls.registered(tmp := Path("peers"), torch.device("cuda")) as names:
        inputs = make_pixels(tower.module, [(256, 256)])
        other = twin(tower.module)
        apply_(other, Recipe(vision_attention="bf16"))
        assert _use_fastest(other, inputs, names) == "fast"
        seen.clear()
        with torch.no_grad():
            other(**inputs)
        assert seen == [tmp] * 2
        with pytest.raises(UnsupportedError, match="plain attention or with packed; got causal"):
            x = torch.zeros(1, 3, 2, 64, dtype=torch.bfloat16)
            ops.attention(x, x, x, AttentionSpec(causal=True), impl="fast")
        with pytest.raises(UnsupportedError, match="softmax scale"):
            ops.attention(x, x, x, AttentionSpec(softmax_scale=1.0), impl="fast")
        with pytest.raises(UnsupportedError, match=r"in bfloat16, got torch\.float32"):
            ops.attention(x.float(), x.float(), x.float(), impl="fast")
    assert not {"missing", "fast"} & set(impl_names("attention"))


def test_the_tower_stays_as_it_was(tower):
    keys = list(tower.module.state_dict())
    run_encoder(tower, EncoderCase("hd", 1), "x", recipes=["static"])
    assert list(tower.module.state_dict()) == keys
    assert tower.module.config._attn_implementation == "sdpa"


def test_what_is_refused(tower):
    with pytest.raises(UnsupportedError, match="CUDA graphs need a CUDA GPU"):
        run_encoder(tower, EncoderCase("hd", 1), "x", use_graphs=True)
    with pytest.raises(
        ConfigError, match="row int4: expected words out of .*dynamic.*; got 'int4'"
    ):
        run_encoder(tower, EncoderCase("hd", 1), "x", recipes=["bf16", "int4"])
    with pytest.raises(ConfigError, match="expected different rows, got"):
        run_encoder(tower, EncoderCase("hd", 1), "x", recipes=[])
    with pytest.raises(ConfigError, match="expected resolutions of .*; got '8k'"):
        EncoderCase("8k", 1)
    with pytest.raises(ConfigError, match="at least one image, got 0"):
        EncoderCase("hd", 0)
    with pytest.raises(ConfigError, match="expected a config, one of .* got 'huge'"):
        make_tower("huge", CPU)
    with pytest.raises(ConfigError, match="expected 1 to 2 layers, got 3"):
        make_tower("tiny", CPU, num_layers=3)


def test_towers_share_weights_but_not_settings(tower):
    other = twin(tower.module)
    ours, theirs = (list(t.parameters()) for t in (tower.module, other))
    assert all(a is b for a, b in zip(ours, theirs, strict=True))
    other.config._attn_implementation = "eager"
    assert tower.module.config._attn_implementation == "sdpa"
    assert other.blocks[0].attn.config._attn_implementation == "eager"


def test_towers_of_folders(tmp_path, tower):
    """A whole model's files: the tower's weights among others; then a config alone."""
    from safetensors.torch import save_file

    tower.module.config.save_pretrained(tmp_path)
    assert open_tower(tmp_path, CPU, num_layers=1).weights == "random"
    state = {f"model.visual.{k}": v.contiguous() for k, v in tower.module.state_dict().items()}
    save_file(
        {**state, "model.language_model.norm.weight": torch.ones(2)}, tmp_path / "a.safetensors"
    )
    opened = open_tower(tmp_path, CPU)
    assert opened.weights == "checkpoint" and opened.name == tmp_path.name
    inputs = make_pixels(tower.module, [(256, 256)])
    with torch.no_grad():
        expected, actual = (t.module(**inputs).pooler_output for t in (tower, opened))
    assert_same_bits(actual, expected)
    with pytest.raises(ConfigError, match="has weights for every layer"):
        open_tower(tmp_path, CPU, num_layers=1)
    del state["model.visual.blocks.1.attn.proj.bias"]
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"none for 1 of .*blocks\.1\.attn\.proj\.bias"):
        open_tower(tmp_path, CPU)
    with pytest.raises(CheckpointError, match="expected a model's folder with a config.json"):
        open_tower(tmp_path / "none", CPU)


@pytest.mark.gpu
def test_graphs_are_timed_too():
    tower = make_tower("qwen3-vl-30b-a3b", torch.device("cuda"), num_layers=2)
    records, objections = run_encoder(tower, EncoderCase("hd", 3), "x", use_graphs=True)
    rows = {(r.impl, r.case["recipe"], r.case["graphs"]) for r in records}
    assert {
        ("octavo", "static", True),
        ("octavo", "dynamic", True),
        ("octavo", "fused-bf16", True),
    } <= rows
    fused = [r for r in records if r.case["recipe"] == "fused-bf16"]
    assert [r.case["graphs"] for r in fused] == [False, True]
    assert all(r.values["fused_speedup"] == 1 for r in fused)
    assert ("sdpa", "bf16", True) not in rows
    assert any("asks the device for lengths" in o.reason for o in objections)
    assert all(r.values["tokens"] == 3 * 3520 for r in records)
    by_graphs = [r for r in records if r.case["graphs"]]
    assert all(r.values["graph_relative_rms"] <= MAX_GRAPH_ERROR for r in by_graphs)
