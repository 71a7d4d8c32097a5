"""A model whose vision tower runs by graphs: the model's own calls reach them, with all they ask.

On a CPU a budget's padded pass stands in for the replay of its graph.
"""

import copy
import pickle
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from PIL import Image

from octavo import Recipe
from octavo.calibration.scale_file import load_scales
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.apply import apply_, restore_
from octavo.integrations.transformers import vision_graphs
from octavo.integrations.transformers.calibrate import autosave
from octavo.integrations.transformers.vision_graphs import (
    VisionGraphs,
    _Captured,
    drop_graphs_,
    use_graphs_,
)
from octavo.integrations.transformers.vision_language import TinyModel, find_tower, generate
from octavo.layers.encoder_attention import EncoderAttention
from octavo.testing.asserts import assert_same_bits

CPU = torch.device("cpu")
BUDGETS = (16, 64)
FP8 = Recipe(vision_attention="fp8")


class StandIn:
    """Replays as a graph does, on a CPU: into the same memory, and no hook of the tower is told."""

    def __init__(self, graphs, inputs, budget):
        self.forward = lambda: graphs._forward(inputs, budget)
        self.result, self.num_replays = self.forward(), 0

    def replay(self):
        self.num_replays += 1
        new = self.forward()
        self.result.pooler_output.copy_(new.pooler_output)
        self.result.last_hidden_state.copy_(new.last_hidden_state)
        for old, x in zip(self.result.deepstack_features, new.deepstack_features, strict=True):
            old.copy_(x)


def capture(self, inputs, budget):
    static = {name: x.clone() for name, x in inputs.items()}
    with vision_graphs.history_kept(self.tower), vision_graphs.not_counted(self.tower):
        graph = StandIn(self, static, budget)
    return _Captured(graph, static, graph.result)


@pytest.fixture
def by_stand_in(monkeypatch):
    monkeypatch.setattr(VisionGraphs, "objection", VisionGraphs._objection_to_attention)
    monkeypatch.setattr(VisionGraphs, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.fixture
def tiny():
    return TinyModel(CPU)


def request(tiny, *sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = (torch.randint(0, 256, (h, w, 3), generator=generator) for h, w in sizes)
    images = [Image.fromarray(x.to(torch.uint8).numpy()) for x in noise]
    return tiny.prepare("what?", images).inputs


def num_replays(model):
    captured = find_tower(model).octavo_graphs._captured
    return {budget: each.graph.num_replays for budget, each in captured.items()}


@torch.no_grad()
def features(model, inputs):
    found = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    # Of each layer: features of all images, or of each of them, by version.
    layers = [x if isinstance(x, torch.Tensor) else torch.cat(x) for x in found[2]]
    return torch.cat(found.pooler_output), torch.cat(layers)


def histories(model):
    layers = [m for m in model.modules() if isinstance(m, EncoderAttention)]
    return [x.clone() for layer in layers for x in layer.buffers()]


def test_a_models_own_calls_replay_the_tower(tiny, by_stand_in):
    """generate and get_image_features have the eager model's bits and histories, in any mode."""
    apply_(tiny.model, FP8)
    plain = copy.deepcopy(tiny.model)
    assert use_graphs_(tiny.model, BUDGETS) == ["model.visual"]
    small, large = request(tiny, (64, 64)), request(tiny, (128, 96), seed=1)
    ids = []
    for model in (plain, tiny.model):
        with torch.inference_mode():
            ids.append([model.generate(**x, max_new_tokens=3) for x in (small, large)])
        for actual, expected in zip(features(model, small), features(plain, small), strict=True):
            assert_same_bits(actual, expected)
        features(model, large)
    for actual, expected in zip(*ids, strict=True):
        assert_same_bits(actual, expected)
    assert num_replays(tiny.model) == {16: 2, 64: 2}
    assert generate(tiny.model, small, 2) == 2 and num_replays(tiny.model)[16] == 3


def test_histories_are_those_of_eager_calls(tiny, by_stand_in):
    apply_(tiny.model, FP8)
    plain = copy.deepcopy(tiny.model)
    use_graphs_(tiny.model, BUDGETS)
    for seed, size in enumerate([(64, 64), (128, 128), (32, 96)]):
        inputs = request(tiny, size, seed=seed)
        for one, other in zip(features(tiny.model, inputs), features(plain, inputs), strict=True):
            assert_same_bits(one, other)
        for one, other in zip(histories(tiny.model), histories(plain), strict=True):
            assert_same_bits(one, other)
    assert len(histories(plain)) > 0


def test_what_fits_no_budget_runs_eagerly(tiny, by_stand_in):
    apply_(tiny.model, FP8)
    plain = copy.deepcopy(tiny.model)
    use_graphs_(tiny.model, [16], max_sequences=1)
    for inputs in (request(tiny, (128, 128)), request(tiny, (32, 32), (32, 32))):
        for one, other in zip(features(tiny.model, inputs), features(plain, inputs), strict=True):
            assert_same_bits(one, other)
    assert num_replays(tiny.model) == {}
    tower = find_tower(tiny.model)
    with torch.no_grad():  # and whatever is asked for is passed on
        found = tower(
            inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], output_hidden_states=True
        )
    assert len(found.hidden_states) == 3


def test_keywords_are_taken_or_refused_by_name(tiny, by_stand_in):
    apply_(tiny.model, FP8)
    use_graphs_(tiny.model, BUDGETS)
    tower, inputs = find_tower(tiny.model), request(tiny, (64, 64))
    given = {"hidden_states": inputs["pixel_values"], "grid_thw": inputs["image_grid_thw"]}
    found = tower(**given, return_dict=True, output_hidden_states=False, position_ids=None)
    as_tuple = tower(**given, return_dict=False)
    assert isinstance(as_tuple, tuple) and as_tuple[1].shape == found.pooler_output.shape
    tower.config.return_dict = False
    assert isinstance(tower(**given), tuple)
    for name, value in {
        "output_hidden_states": True,
        "output_attentions": True,
        "cu_seqlens": torch.tensor([0, 16]),
        "max_seqlen": 16,
        "unheard_of": 0,
    }.items():
        with pytest.raises(UnsupportedError, match=rf"got {name}: drop_graphs_"):
            tower(**given, **{name: value})
    with pytest.raises(UnsupportedError, match="got cu_seqlens"):
        tiny.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], image_cu_seqlens=torch.tensor([0, 16])
        )
    with pytest.raises(TypeError, match="grid_thw"):
        tower(given["hidden_states"])


def test_graphs_are_for_inference(tiny, by_stand_in):
    apply_(tiny.model, FP8)
    use_graphs_(tiny.model, BUDGETS)
    inputs = request(tiny, (64, 64))
    tower, grid = find_tower(tiny.model), inputs["image_grid_thw"]
    with pytest.raises(UnsupportedError, match="for inference"):
        tower(inputs["pixel_values"].requires_grad_(), grid)
    tiny.model.train()
    with pytest.raises(UnsupportedError, match=r"model\.eval\(\)"):
        tower(inputs["pixel_values"].detach(), grid)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_have_graphs_of_their_own(tiny, by_stand_in, copied):
    apply_(tiny.model, FP8)
    keys = list(tiny.model.state_dict())
    use_graphs_(tiny.model, BUDGETS)
    inputs = request(tiny, (64, 64))
    vars(tiny.model.model.visual)[vision_graphs.GRAPHS]._pool = object()
    expected = features(tiny.model, inputs)
    find_tower(tiny.model).octavo_graphs._captured.clear()  # the stand-in itself is no graph
    other = copied(tiny.model)
    theirs = find_tower(other).octavo_graphs
    assert theirs.tower is find_tower(other) and theirs.budgets == BUDGETS
    assert theirs is not find_tower(tiny.model).octavo_graphs and theirs._pool is None
    before = histories(tiny.model)
    for one, another in zip(features(other, inputs), expected, strict=True):
        assert one.shape == another.shape and one.isfinite().all()
    assert num_replays(other) == {16: 1} and num_replays(tiny.model) == {}
    for one, another in zip(histories(tiny.model), before, strict=True):
        assert_same_bits(one, another)
    assert list(tiny.model.state_dict()) == list(other.state_dict()) == keys


def test_a_copy_has_no_graph_of_another(tiny):
    """What cannot be copied is left out, not tried."""
    apply_(tiny.model, FP8)
    graphs = VisionGraphs(find_tower(tiny.model), BUDGETS)
    graphs._captured[16] = (x for x in ())  # a generator cannot be copied either
    assert copy.deepcopy(graphs)._captured == {} and len(graphs._captured) == 1


def test_drop_and_restore(tiny, by_stand_in):
    apply_(tiny.model, FP8)
    use_graphs_(tiny.model, BUDGETS)
    with pytest.raises(ConfigError, match="got one that has them: drop_graphs_"):
        use_graphs_(tiny.model, BUDGETS)
    tower = find_tower(tiny.model)
    assert drop_graphs_(tiny.model) == ["model.visual"]
    assert "forward" not in vars(tower) and vision_graphs.GRAPHS not in vars(tower)
    with pytest.raises(ConfigError, match="got one without graphs"):
        drop_graphs_(tiny.model)
    use_graphs_(tiny.model, BUDGETS)
    undone = restore_(tiny.model).layers
    assert undone.keys() == {"vision_attention", "vision_graphs"}
    assert "forward" not in vars(tower) and tower.config._attn_implementation == "sdpa"
    assert use_and_restore_tower_alone(tower) == ["vision_graphs", "vision_attention"]


def use_and_restore_tower_alone(tower):
    apply_(tower, FP8)
    assert use_graphs_(tower, BUDGETS) == [""]
    return list(restore_(tower).layers)


def test_what_hides_the_forward_is_undone_first(tiny, by_stand_in):
    apply_(tiny.model, FP8)
    tower = find_tower(tiny.model)
    tower.forward = partial(type(tower).forward, tower)
    with pytest.raises(UnsupportedError, match=r"model\.visual: expected the forward of its class"):
        use_graphs_(tiny.model, BUDGETS)
    del tower.forward
    use_graphs_(tiny.model, BUDGETS)
    ours, tower.forward = tower.forward, lambda *args, **options: None
    for undo in (drop_graphs_, restore_):
        with pytest.raises(ConfigError, match="undo what replaced it first"):
            undo(tiny.model)
    tower.forward = ours
    assert set(restore_(tiny.model).layers) == {"vision_attention", "vision_graphs"}


def test_what_cannot_run_by_graphs_is_refused_at_once(tiny, monkeypatch):
    apply_(tiny.model, FP8)
    with pytest.raises(UnsupportedError, match="CUDA graphs need a CUDA GPU, got a tower on cpu"):
        use_graphs_(tiny.model, BUDGETS)
    assert vision_graphs.GRAPHS not in vars(find_tower(tiny.model))
    with pytest.raises(UnsupportedError, match="expected a model with a vision tower, one of"):
        use_graphs_(torch.nn.Linear(2, 2), BUDGETS)
    monkeypatch.setattr(VisionGraphs, "objection", VisionGraphs._objection_to_attention)
    with pytest.raises(ConfigError, match="multiples of 4 tokens"):
        use_graphs_(tiny.model, [63])
    use_graphs_(tiny.model, BUDGETS)
    monkeypatch.undo()  # as if the model were moved to the CPU by now
    with pytest.raises(UnsupportedError, match=r"got a tower on cpu; or drop_graphs_"):
        features(tiny.model, request(tiny, (64, 64)))
    drop_graphs_(tiny.model)
    restore_(tiny.model)
    monkeypatch.setattr(VisionGraphs, "objection", VisionGraphs._objection_to_attention)
    with pytest.raises(UnsupportedError, match="attention 'sdpa' asks .* apply_ a recipe"):
        use_graphs_(tiny.model, BUDGETS)


def test_replays_count_once_for_who_saves_scales(tiny, by_stand_in, tmp_path):
    """The saver watches the tower's calls: neither missed nor counted twice."""
    apply_(tiny.model, FP8)
    use_graphs_(tiny.model, BUDGETS)
    path = tmp_path / "scales.json"
    saver = autosave(tiny.model, path)
    assert saver.is_watching(find_tower(tiny.model)) and not saver.is_watching(tiny.model)
    for index in range(16):
        assert saver._num_steps == index and not path.exists()
        features(tiny.model, request(tiny, (64, 64), seed=index))
    assert saver.is_saved and load_scales(path).header.passes == 16


def test_who_watches_a_module_inside_is_told(tiny, by_stand_in):
    """A replay calls no module inside of the tower."""
    apply_(tiny.model, FP8)
    use_graphs_(tiny.model, BUDGETS)
    steps = []

    class Saver:
        def is_watching(self, module):
            return False

        def step(self):
            steps.append(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision_graphs, "savers_of", lambda tower: [Saver()])
        features(tiny.model, request(tiny, (64, 64)))
    assert steps == [1]


@pytest.mark.gpu
def test_a_model_replays_on_a_gpu():
    tiny = TinyModel(torch.device("cuda"))
    tiny.model.to(torch.bfloat16)
    apply_(tiny.model, FP8)
    plain = copy.deepcopy(tiny.model)
    use_graphs_(tiny.model, BUDGETS)
    for seed, size in enumerate([(64, 64), (128, 128), (64, 64)]):
        inputs = request(tiny, size, seed=seed)
        with torch.inference_mode():
            tiny.model.generate(**inputs, max_new_tokens=2)
            plain.generate(**inputs, max_new_tokens=2)
        actual, expected = features(tiny.model, inputs)[0], features(plain, inputs)[0]
        assert (actual - expected).norm() / expected.norm() < 0.05
    other = copy.deepcopy(tiny.model)
    assert find_tower(other).octavo_graphs._captured == {}
    assert set(find_tower(tiny.model).octavo_graphs._captured) == set(BUDGETS)
    features(other, inputs)
    assert set(restore_(tiny.model).layers) == {"vision_attention", "vision_graphs"}
