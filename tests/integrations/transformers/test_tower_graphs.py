"""Vision towers by graphs without being asked: the bits and histories of eager calls.

On a CPU the operations of a call are recorded and done again, on the same tensors.
"""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from octavo import Recipe, apply_, restore_
from octavo.integrations.transformers import tower_graphs
from octavo.integrations.transformers.calibrate import autosave
from octavo.integrations.transformers.tower_graphs import TowerGraphs
from octavo.integrations.transformers.vision_graphs import VisionGraphs, use_graphs_
from octavo.integrations.transformers.vision_language import TinyModel, find_tower
from octavo.integrations.transformers.vision_tower import make_pixels, make_tower, twin
from octavo.layers.encoder_attention import EncoderAttention
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.cpu_graphs import use_cpu_graphs

RECIPES = {
    "dynamic": Recipe(vision_attention="fp8"),
    "bf16": Recipe(vision_attention="bf16"),
}
IMAGES = [(128, 128)]


@pytest.fixture
def by_cpu_graphs(monkeypatch):
    use_cpu_graphs(monkeypatch, tower_graphs)
    monkeypatch.setattr(VisionGraphs, "objection", VisionGraphs._objection_to_attention)
    with torch.no_grad():
        yield


def make_pair(recipe=RECIPES["dynamic"], device="cpu", name="tiny", **options):
    tower = make_tower(name, torch.device(device), **options).module
    graphed, plain = twin(tower), twin(tower)
    apply_(graphed, recipe)
    apply_(plain, recipe, cuda_graphs=False)
    return graphed, plain


def graphs_of(tower):
    return tower.forward.args[0]


def histories(tower):
    layers = [m for m in tower.modules() if isinstance(m, EncoderAttention)]
    return [x for layer in layers for x in layer.buffers()]


def assert_same(graphed, plain, sizes=IMAGES, seed=0):
    inputs = make_pixels(plain, sizes, seed=seed)
    found, expected = graphed(**inputs), plain(**inputs)
    assert_same_bits(found.pooler_output, expected.pooler_output)
    assert_same_bits(found.last_hidden_state, expected.last_hidden_state)
    for one, other in zip(found.deepstack_features, expected.deepstack_features, strict=True):
        assert_same_bits(one, other)
    for one, other in zip(histories(graphed), histories(plain), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("recipe", RECIPES)
def test_shapes_that_were_seen_are_replayed(recipe, by_cpu_graphs):
    graphed, plain = make_pair(RECIPES[recipe])
    with torch.inference_mode():
        for seed in range(3):
            assert_same(graphed, plain, seed=seed)
    assert graphs_of(graphed).num_replays == 2
    # As many tokens in another arrangement share a graph; as many in more images do not.
    for sizes in ([(128, 256)], [(256, 128)], [(128, 128), (128, 128)]):
        assert_same(graphed, plain, sizes)
    assert graphs_of(graphed).num_replays == 3
    assert_same(graphed, plain, [(128, 128), (128, 128)], seed=4)
    assert graphs_of(graphed).num_replays == 4


def test_memory_is_bounded(by_cpu_graphs, monkeypatch):
    monkeypatch.setattr(tower_graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(tower_graphs, "MAX_SEEN", 3)
    graphed, plain = make_pair()
    for columns in (128, 256, 384, 512, 128, 640):
        for seed in range(2):
            assert_same(graphed, plain, [(128, columns)], seed)
    graphs = graphs_of(graphed)
    assert graphs.num_replays == 6 and len(graphs._captured) == 2 and len(graphs._seen) == 3
    monkeypatch.setattr(tower_graphs, "MAX_TOKENS", 8)
    assert_same(graphed, plain, [(128, 640)])
    assert graphs.num_replays == 6


def swap_data(graphed, plain):
    weight = graphed.blocks[0].mlp.linear_fc1.weight
    assert weight is plain.blocks[0].mlp.linear_fc1.weight
    # Once: the second time, it may come to lie where it lay before, where graphs find it.
    weight.data = 1.5 * weight.data


def cast(graphed, plain):
    for each in (graphed, plain):
        each.to(torch.float32)


@pytest.mark.parametrize("change", [swap_data, cast])
def test_no_graph_survives_its_weights(change, by_cpu_graphs):
    graphed, plain = make_pair()
    for seed in range(2):
        assert_same(graphed, plain, seed=seed)
    assert graphs_of(graphed).num_replays == 1
    change(graphed, plain)
    for seed in range(3):
        assert_same(graphed, plain, seed=seed)
    assert graphs_of(graphed).num_replays == 3


def test_what_runs_eagerly(by_cpu_graphs):
    graphed, plain = make_pair()
    for seed in range(2):
        assert_same(graphed, plain, seed=seed)
    graphs, inputs = graphs_of(graphed), make_pixels(plain, IMAGES)
    assert len(graphed(**inputs, output_hidden_states=True).hidden_states) == 3
    assert isinstance(graphed(**inputs, return_dict=False), tuple)
    with torch.enable_grad():
        graphed(**inputs)
    graphed.train()
    graphed(**inputs)
    graphed.eval()
    assert graphs.num_replays == 1
    seen = []
    handle = graphed.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match=r"blocks\.0 has hooks.*cuda_graphs=False"):
        graphed(**inputs)
    assert seen == [1] and graphs.num_replays == 1
    handle.remove()
    for _ in range(2):
        graphed(**inputs)
    assert graphs.num_replays == 2


def test_without_memory_it_runs_eagerly(by_cpu_graphs, monkeypatch):
    graphed, plain = make_pair()
    monkeypatch.setattr(tower_graphs, "memory_of", lambda device: (0, 8))
    assert_same(graphed, plain)
    with pytest.warns(UserWarning, match="too little memory is free"):
        assert_same(graphed, plain)
    assert graphs_of(graphed).num_replays == 0


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_capture_their_own(copied, by_cpu_graphs):
    graphed, plain = make_pair()
    for seed in range(2):
        assert_same(graphed, plain, seed=seed)
    other = copied(graphed)
    assert graphs_of(other).tower is other and graphs_of(other).num_replays == 0
    third = copy.deepcopy(plain)
    for seed in range(3):
        assert_same(other, third, seed=seed)
    assert graphs_of(other).num_replays == 2 and graphs_of(graphed).num_replays == 1


def test_a_models_own_calls_and_restore(by_cpu_graphs):
    tiny = TinyModel(torch.device("cpu"))
    changes = apply_(tiny.model, RECIPES["dynamic"])
    assert "seen before replay CUDA graphs" in str(changes)
    tower = find_tower(tiny.model)
    from PIL import Image

    inputs = tiny.prepare("what?", [Image.new("RGB", (64, 64), "red")]).inputs
    first = tiny.model.generate(**inputs, max_new_tokens=2)
    for _ in range(2):
        assert torch.equal(tiny.model.generate(**inputs, max_new_tokens=2), first)
    assert graphs_of(tower).num_replays == 2
    use_graphs_(tiny.model, [16, 64])  # budgets take their place
    assert not isinstance(tower.forward.args[0], TowerGraphs)
    assert restore_(tiny.model).layers.keys() == {"vision_attention", "vision_graphs"}
    assert "forward" not in vars(tower)
    assert apply_(tiny.model, RECIPES["dynamic"], cuda_graphs=False).graphs == {}
    assert "forward" not in vars(tower)
    restore_(tiny.model)
    apply_(tiny.model, RECIPES["dynamic"])
    assert restore_(tiny.model).layers.keys() == {"vision_attention"}
    assert "forward" not in vars(tower)


def test_replays_count_for_who_saves_scales(by_cpu_graphs, tmp_path):
    graphed, plain = make_pair()
    saver = autosave(graphed, tmp_path / "scales.json")
    for index in range(16):
        assert saver._num_steps == index
        assert_same(graphed, plain, seed=index)
    assert saver.is_saved and graphs_of(graphed).num_replays == 15


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_on_a_gpu_are_what_eager_calls_are(recipe):
    options = {"device": "cuda", "name": "qwen3-vl-30b-a3b", "num_layers": 2}
    graphed, plain = make_pair(RECIPES[recipe], **options)
    with torch.inference_mode():
        for seed in range(4):
            for sizes in ([(256, 256)], [(512, 256), (256, 256)], [(256, 512), (256, 256)]):
                assert_same(graphed, plain, sizes, seed)
    # Of 4 calls with the first shape and 8 with the other, one each was eager.
    assert graphs_of(graphed).num_replays == 3 + 7
    swap_data(graphed, plain)
    with torch.no_grad():
        for seed in range(3):
            assert_same(graphed, plain, [(256, 256)], seed)
    assert graphs_of(graphed).num_replays == 3 + 7 + 2
    restore_(graphed)
