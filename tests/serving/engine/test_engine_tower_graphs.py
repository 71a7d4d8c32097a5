"""The engine's vision tower by CUDA graphs; on a CPU a padded pass stands in for each."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")
import octavo
from octavo.errors import ConfigError
from octavo.integrations.patch import is_patched
from octavo.integrations.transformers import engine_images, tower_graphs, vision_graphs
from octavo.integrations.transformers.vision_graphs import VisionGraphs
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.request import Request, Sampling, gather
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.cpu_graphs import use_cpu_graphs
from octavo_testkit.models.vision_families import make_model, make_processor, place_images

FP8 = octavo.Recipe(vision_attention="fp8")
PARTS = ((5, 6, 7), [1], (8, 9), [6], (10,))


@pytest.fixture
def replays(monkeypatch):
    """The budgets that were replayed, each by the pass that its graph would hold."""
    found = []

    def replay(self, hidden_states, grid_thw, budget):
        found.append(budget)
        return self.run_padded(hidden_states, grid_thw)

    monkeypatch.setattr(VisionGraphs, "objection", VisionGraphs._objection_to_attention)
    monkeypatch.setattr(VisionGraphs, "replay", replay)
    return found


def make_engine(recipe=FP8, device="cpu", model=None, **settings):
    options = {"page_size": 16, "num_pages": 16, "max_num_seqs": 4, **settings}
    model = make_model("qwen3_vl").to(device) if model is None else model
    return load_engine(model, recipe, EngineSettings(**options), image_processor=make_processor())


def answer(engine):
    tokens, images = place_images(list(PARTS))
    sampling = Sampling(max_tokens=6, temperature=0)
    engine.add(Request(request_id="a", prompt=tokens, images=images, sampling=sampling))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    found = gather(deltas)
    assert found.finish_reason == "length"
    return found.tokens


def test_the_tower_replays_by_default(replays):
    plain = make_engine(cuda_graphs=False)
    truth = answer(plain)
    assert replays == []
    engine = make_engine()
    assert engine._images.has_graphs
    assert answer(engine) == truth
    assert len(replays) == 1 and replays[0] in (256, 512)
    model = engine.model
    engine.close()
    assert not engine._images.has_graphs
    assert vision_graphs.GRAPHS not in vars(model.base_model.visual)


def test_a_tower_without_a_recipe_stays_as_it_is(replays):
    """Its attention asks the device for lengths, which no graph can."""
    engine = make_engine(None)
    assert not engine._images.has_graphs
    assert answer(engine) and replays == []


def test_a_cpu_has_no_graphs():
    assert not make_engine()._images.has_graphs


def test_a_tower_that_no_graph_can_hold(replays, monkeypatch, caplog):
    truth = answer(make_engine(cuda_graphs=False))

    def fail(self, *_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(VisionGraphs, "replay", fail)
    engine = make_engine()
    assert answer(engine) == truth
    assert "runs without CUDA graphs, which failed: operation not permitted" in caplog.text
    assert not engine._images.has_graphs


def test_budgets_are_bounded(replays):
    graphs = vars(make_engine().model.base_model.visual)[vision_graphs.GRAPHS]
    assert graphs.budgets[0] == 256 and graphs.budgets[-1] == engine_images.MAX_PATCHES
    assert graphs.max_sequences == engine_images.MAX_IMAGES


@pytest.mark.parametrize("has_graphs", [None, False], ids=["default", "none"])
def test_graphs_of_apply_make_way(replays, monkeypatch, has_graphs):
    """While the engine has a model, its tower has the engine's graphs or none."""
    use_cpu_graphs(monkeypatch, tower_graphs)
    truth = answer(make_engine(cuda_graphs=False))
    model = make_model("qwen3_vl")
    octavo.apply_(model, FP8)
    tower = model.base_model.visual
    assert tower.forward.func is tower_graphs.shaped_forward
    engine = make_engine(None, model=model, cuda_graphs=has_graphs)
    assert not is_patched(tower, tower_graphs.AUTOMATIC)
    for _ in range(3):
        assert answer(engine) == truth
    assert engine._images.has_graphs == bool(replays) == (has_graphs is None)
    engine.close()
    assert tower.forward.func is tower_graphs.shaped_forward
    octavo.restore_(model)
    assert "forward" not in vars(tower)


def test_a_refused_model_keeps_its_graphs():
    model = make_model("qwen3_vl")
    octavo.apply_(model, FP8)
    with pytest.raises(ConfigError, match="restore_ it first"):
        make_engine(FP8, model=model)
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        make_engine(None, model=model, max_num_batched_tokens=1)
    assert is_patched(model.base_model.visual, tower_graphs.AUTOMATIC)


def make_bf16_model(device):
    """A model whose heads are large enough for kernels: the reference would ask for lengths."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
    sizes = {"head_dim": 64, "rope_parameters": {**rope, "mrope_section": [16, 8, 8]}}
    return make_model("qwen3_vl", vision={"hidden_size": 144}, **sizes).to(device, torch.bfloat16)


def test_a_tower_in_bf16_replays(replays):
    engine = make_engine(octavo.Recipe(vision_attention="bf16"), model=make_bf16_model("cpu"))
    assert engine._images.has_graphs
    assert answer(engine) and len(replays) == 1
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_the_tower_replays_by_default_on_a_gpu(kind, request):
    """The tokens of the padded passes that its graphs hold; without padding, bf16 may round
    otherwise.
    """
    recipe = octavo.Recipe(vision_attention=kind)
    engine = make_engine(recipe, model=make_bf16_model("cuda"))
    assert engine._images.has_graphs
    found = [answer(engine) for _ in range(2)]
    assert engine._images.has_graphs  # no capture failed
    assert vars(engine.model.base_model.visual)[vision_graphs.GRAPHS]._captured
    engine.close()
    budgets = request.getfixturevalue("replays")
    padded = make_engine(recipe, model=make_bf16_model("cuda"))
    assert [answer(padded) for _ in range(2)] == found and budgets
    padded.close()
