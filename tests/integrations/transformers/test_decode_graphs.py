"""generate() by graphs: the tokens of eager steps, and no graph that is out of date.

On a CPU the operations of a step are recorded and done again, on the same tensors.
"""

import copy
import gc
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from transformers import DynamicCache

from octavo import Recipe, apply_, restore_
from octavo.errors import ConfigError
from octavo.integrations.transformers import cache_rooms, decode_graphs
from octavo.integrations.transformers.cache_rooms import GRAPHS
from octavo.integrations.transformers.kv_cache import GRAPHS_FEATURE
from octavo.integrations.transformers.saturation import read_saturation
from octavo.integrations.transformers.text import find_decoder
from octavo_testkit.cpu_graphs import use_cpu_graphs
from octavo_testkit.models.image_models import make_model
from octavo_testkit.models.text_models import few, make_decoder, make_prompts

pytestmark = pytest.mark.filterwarnings("ignore:the model brings no scales")
FP8 = Recipe(kv_cache="fp8")


@pytest.fixture(autouse=True)
def by_cpu_graphs(monkeypatch):
    use_cpu_graphs(monkeypatch, decode_graphs)
    monkeypatch.setattr(cache_rooms, "MIN_GROWTH_TOKENS", 32)
    with torch.no_grad():
        yield


def make_pair(family="llama", recipe=FP8, make=make_decoder):
    """A model with graphs and the same one without."""
    model, plain = make(family), make(family)
    apply_(model, recipe)
    apply_(plain, recipe, cuda_graphs=False)
    return model, plain


def graphs_of(model):
    return vars(find_decoder(model)[1])[GRAPHS]


def counts(model):
    graphs = graphs_of(model)
    return graphs.num_captures, graphs.num_replays


def generate(model, prompts, num_tokens=8, **options):
    torch.manual_seed(3)
    options = {"do_sample": False, "max_new_tokens": num_tokens, **options}
    return model.generate(**prompts, **options)


def assert_same_tokens(model, plain, prompts, num_tokens=8, **options):
    expected = generate(plain, prompts, num_tokens, **options)
    assert torch.equal(generate(model, prompts, num_tokens, **options), expected)


@pytest.mark.parametrize("family", few("llama"))
def test_steps_are_replayed_with_the_same_tokens(family):
    model, plain = make_pair(family)
    for batch, mode in ((1, torch.inference_mode()), (3, nullcontext())):
        prompts = make_prompts(batch, 55)
        with mode:
            assert_same_tokens(model, plain, prompts, 16)  # over a page's end
    # Of 15 steps after the prompt the first one is eager, the second captured and replayed.
    assert counts(model) == (2, 2 * 14)
    assert_same_tokens(model, plain, make_prompts(1, 61, seed=7), 5)
    assert counts(model) == (2, 2 * 14 + 4)  # at once, and nothing is captured again


WAYS = {
    "sampling": {"do_sample": True, "top_p": 0.9},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "penalty": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    "static": {"cache_implementation": "static"},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "no cache": {"use_cache": False},
}
EAGER = {"static", "no cache"}


QUICK = {"sampling", "beams", "static", "lookup"}


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[] if w in QUICK else pytest.mark.slow) for w in WAYS]
)
def test_every_way_to_generate(way):
    model, plain = make_pair()
    prompts = make_prompts(1 if way == "lookup" else 2, 20)
    assert_same_tokens(model, plain, prompts, 6, **WAYS[way])
    assert (counts(model)[1] > 0) == (way not in EAGER)


def test_assisted_generation():
    model, plain = make_pair()
    assistant, other = make_pair()
    prompts = make_prompts(1, 20)
    expected = generate(plain, prompts, 12, assistant_model=other)
    assert torch.equal(generate(model, prompts, 12, assistant_model=assistant), expected)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions", "output_scores"])
def test_outputs_that_are_asked_for(name):
    model, plain = make_pair()
    prompts = make_prompts(2, 9)
    options = {name: True, "return_dict_in_generate": True}
    found, expected = generate(model, prompts, **options), generate(plain, prompts, **options)
    key = name.removeprefix("output_")
    assert len(found[key]) == len(expected[key]) == 8
    assert torch.equal(found.sequences, expected.sequences)
    if key == "hidden_states":
        pairs = zip(found[key][-1], expected[key][-1], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        assert counts(model) == (0, 0)
    assert_same_tokens(model, plain, prompts)  # the hooks that stay are no objection
    assert counts(model)[1] > 0


def test_the_text_of_a_vision_language_model():
    """Steps come as embeddings with three positions for each."""
    model, plain = make_pair(make=lambda _: make_model().float())
    prompts = {"input_ids": make_prompts(1, 30)["input_ids"] % 98 + 2}
    assert_same_tokens(model, plain, prompts, 6)
    assert counts(model) == (1, 4)


def test_a_room_grows_and_later_caches_have_it():
    model, plain = make_pair()
    rooms, prompts = graphs_of(model).rooms, make_prompts(2, 30)
    assert_same_tokens(model, plain, prompts, 40)
    assert (*counts(model), len(rooms)) == (2, 38, 1)  # 64 and 128 tokens
    assert_same_tokens(model, plain, prompts, 4)
    assert counts(model) == (2, 38 + 3)
    assert_same_tokens(model, plain, make_prompts(2, 130), 4)  # too long: this room makes way
    assert counts(model) == (3, 38 + 3 + 2) and len(rooms) == 1


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(cache_rooms, "MAX_ROOMS", 2)
    model, plain = make_pair()
    rooms = graphs_of(model).rooms
    for batch in range(1, 4):
        assert_same_tokens(model, plain, make_prompts(batch, 6), 4)
    gc.collect()
    assert len(rooms) == 2
    limit = rooms.kept_bytes // 2
    use_cpu_graphs(monkeypatch, decode_graphs, limit)
    assert_same_tokens(model, plain, make_prompts(1, 6), 4)
    assert 0 < rooms.kept_bytes <= limit
    use_cpu_graphs(monkeypatch, decode_graphs, 1)
    assert_same_tokens(model, plain, make_prompts(4, 6), 4)
    assert len(rooms) == 0 == rooms.kept_bytes


def steps(model, cache, ids, start):
    """Logits of one token after the other, as a loop of one's own."""
    found = []
    for place in range(ids.shape[1]):
        positions = torch.full((len(ids), 1), start + place)
        call = {"position_ids": positions, "past_key_values": cache}
        found.append(model(ids[:, place : place + 1], **call).logits)
    return torch.cat(found, 1)


def test_caches_that_live_side_by_side():
    model, plain = make_pair()
    ids = make_prompts(2, 40)["input_ids"].clamp(min=2)
    caches, logits = [], []
    for each in (model, plain):
        caches.append([DynamicCache(config=each.config) for _ in range(2)])
        for cache, shift in zip(caches[-1], (0, 3), strict=True):
            each(ids[:, : 20 + shift], past_key_values=cache)
    for each, pair in zip((model, plain), caches, strict=True):
        found = []
        for start in range(0, 12, 3):  # in turn
            for cache, shift in zip(pair, (0, 3), strict=True):
                first = 20 + shift + start
                found.append(steps(each, cache, ids[:, first : first + 3], first))
        logits.append(torch.cat(found, 1))
    assert torch.equal(*logits)
    assert counts(model) == (2, 2 * 11) and len(graphs_of(model).rooms) == 2


def test_a_conversation_goes_on_in_its_cache():
    """Passes of several tokens, a crop, chosen and repeated sequences between steps."""
    model, plain = make_pair()
    ids = make_prompts(1, 60)["input_ids"].clamp(min=2).expand(2, -1)
    logits = []
    for each in (model, plain):
        cache, found = DynamicCache(config=each.config), []
        each(ids[:, :10], past_key_values=cache)
        found.append(steps(each, cache, ids[:, 10:14], 10))
        found.append(each(ids[:, 14:20], past_key_values=cache).logits)
        found.append(steps(each, cache, ids[:, 20:24], 20))
        cache.crop(-3)
        found.append(steps(each, cache, ids[:, 21:24], 21))
        cache.reorder_cache(torch.tensor([1, 0]))
        found.append(steps(each, cache, ids[:, 24:26], 24))
        cache.batch_repeat_interleave(2)
        found.append(steps(each, cache, ids.repeat(2, 1)[:, 26:30], 26)[:2])
        other = copy.deepcopy(cache)
        found.append(steps(each, other, ids.repeat(2, 1)[:, 30:33], 30)[:2])
        found.append(steps(each, cache, ids.repeat(2, 1)[:, 33:36], 30)[:2])
        cache.reset()
        each(ids.repeat(2, 1)[:, :5], past_key_values=cache)
        found.append(steps(each, cache, ids.repeat(2, 1)[:, 5:9], 5)[:2])
        logits.append(torch.cat(found, 1))
    assert torch.equal(*logits)
    num_captures, num_replays = counts(model)
    assert num_captures == 2 and num_replays > 10


def test_counters_are_those_of_eager_steps():
    model, plain = make_pair(recipe=Recipe(kv_cache={"scaling": "unit"}))
    for each in (model, plain):
        for layer in find_decoder(each)[1].layers:
            layer.self_attn.v_proj.weight.mul_(2000)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*beyond the range.*")
        for each in (model, plain):
            generate(each, make_prompts(2, 9), 10)
    found = read_saturation(model)
    assert found == read_saturation(plain) and sum(map(sum, found.values())) > 0
    assert counts(model)[1] == 8


def replace_module(model):
    norm = model.model.norm
    model.model.norm = type(norm)(norm.weight.numel())
    model.model.norm.weight.copy_(torch.linspace(0.1, 3, norm.weight.numel()))


def assign_weights(model):
    state = {
        name: 1.5 * x for name, x in model.state_dict().items() if name.endswith("q_proj.weight")
    }
    model.load_state_dict(state, strict=False, assign=True)


def load_weights(model):
    state = {
        name: 1.5 * x for name, x in model.state_dict().items() if name.endswith("q_proj.weight")
    }
    model.load_state_dict(state, strict=False)


def swap_data(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data = 1.5 * layer.mlp.up_proj.weight.data


# How weights change, and how many graphs are captured anew.
CHANGES = {
    "in place": (lambda model: model.model.embed_tokens.weight.mul_(1.5), 0),
    "loaded": (load_weights, 0),
    "assigned": (assign_weights, 1),
    "data": (swap_data, 1),
    "module": (replace_module, 1),
    "device and dtype": (lambda model: model.to(torch.bfloat16), 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_graph_survives_its_weights(change):
    model, plain = make_pair()
    prompts = make_prompts(2, 9)
    assert_same_tokens(model, plain, prompts, 6)
    before, first = counts(model), generate(plain, prompts, 6)
    apply_change, num_captures = CHANGES[change]
    for each in (model, plain):
        apply_change(each)
    assert_same_tokens(model, plain, prompts, 6)
    assert counts(model)[0] == before[0] + num_captures and counts(model)[1] > before[1]
    if change != "device and dtype":
        assert not torch.equal(generate(model, prompts, 6), first)


def test_weights_change_between_two_steps():
    model, plain = make_pair()
    ids, logits = make_prompts(1, 20)["input_ids"], []
    for each in (model, plain):
        cache = DynamicCache(config=each.config)
        each(ids[:, :10], past_key_values=cache)
        found = [steps(each, cache, ids[:, 10:14], 10)]
        swap_data(each)
        found.append(steps(each, cache, ids[:, 14:18], 14))
        logits.append(torch.cat(found, 1))
    assert torch.equal(*logits) and counts(model) == (2, 7)


class Adapter(nn.Module):
    """As adapters of other libraries: whether it adds anything is no tensor's business."""

    def __init__(self, base):
        super().__init__()
        self.base, self.extra, self.is_on = base, nn.Linear(64, 64, bias=False), True

    def forward(self, x):
        return self.base(x) + self.extra(x) if self.is_on else self.base(x)


def test_adapters_run_eagerly_and_are_told():
    model, plain = make_pair()
    prompts = make_prompts(2, 9)
    assert_same_tokens(model, plain, prompts)
    before = counts(model)
    for each in (model, plain):
        torch.manual_seed(0)
        attention = each.model.layers[1].self_attn
        attention.q_proj = Adapter(attention.q_proj)
    with pytest.warns(UserWarning, match="q_proj is a Adapter of .*cuda_graphs=False"):
        assert_same_tokens(model, plain, prompts)
    for each in (model, plain):
        each.model.layers[1].self_attn.q_proj.is_on = False
    assert_same_tokens(model, plain, prompts)  # told once
    assert counts(model) == before
    for each in (model, plain):
        attention = each.model.layers[1].self_attn
        attention.q_proj = attention.q_proj.base
    assert_same_tokens(model, plain, prompts)
    assert counts(model)[1] > before[1]


def test_hooks_and_replaced_forwards_run_eagerly():
    model, _ = make_pair()
    prompts, seen = make_prompts(2, 9), []
    generate(model, prompts)
    before = counts(model)
    layer = model.model.layers[2]
    handle = layer.mlp.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(UserWarning, match=r"layers\.2\.mlp has hooks"):
        generate(model, prompts)
    assert len(seen) == 8 and counts(model) == before
    handle.remove()
    own = layer.mlp.forward
    layer.mlp.forward = lambda x: seen.append(2) or own(x)
    with pytest.warns(UserWarning, match=r"layers\.2\.mlp: something has replaced its forward"):
        generate(model, prompts)
    assert seen.count(2) == 8 and counts(model) == before
    del layer.mlp.forward
    generate(model, prompts)
    assert counts(model)[1] > before[1]


def test_offloading_runs_eagerly():
    accelerate = pytest.importorskip("accelerate")
    model, plain = make_pair()
    prompts = make_prompts(2, 9)
    assert_same_tokens(model, plain, prompts)
    before = counts(model)
    accelerate.cpu_offload(model.model.layers[0].mlp, torch.device("cpu"))
    with pytest.warns(UserWarning, match="accelerate has hooks|on meta|replaced its forward"):
        assert_same_tokens(model, plain, prompts)
    assert counts(model) == before


def test_modes_in_which_nothing_is_replayed():
    model, _ = make_pair()
    ids, cache = make_prompts(1, 20)["input_ids"], DynamicCache(config=model.config)
    model(ids[:, :10], past_key_values=cache)
    steps(model, cache, ids[:, 10:13], 10)
    before = counts(model)
    assert before[1] == 2
    with torch.enable_grad():
        assert steps(model, cache, ids[:, :1], 13).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        steps(model, cache, ids[:, :1], 14)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        steps(model, cache, ids[:, :1], 15)
    assert counter.get_total_flops() > 0
    model(ids[:, :1], past_key_values=cache)  # without positions
    assert counts(model) == before
    model.train()
    steps(model, cache, ids[:, :1], 17)
    model.eval()
    result = model.model(
        ids[:, :1], position_ids=torch.tensor([[18]]), past_key_values=cache, return_dict=False
    )
    assert isinstance(result, tuple) and counts(model) == before
    steps(model, cache, ids[:, :1], 19)
    assert counts(model)[1] > before[1]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_capture_their_own(copied):
    model, plain = make_pair()
    prompts = make_prompts(2, 9)
    keys = list(model.state_dict())
    assert_same_tokens(model, plain, prompts)
    other = copied(model)
    assert graphs_of(other).decoder is find_decoder(other)[1]
    assert counts(other) == (0, 0) and len(graphs_of(other).rooms) == 0
    before = counts(model)
    assert_same_tokens(other, plain, prompts)
    assert counts(other)[1] > 0 and counts(model) == before
    assert list(other.state_dict()) == keys


def test_restore_and_a_model_without_graphs():
    model, plain = make_pair()
    decoder = find_decoder(model)[1]
    stock = generate(make_decoder("llama"), make_prompts(2, 9))
    generate(model, make_prompts(2, 9))
    assert GRAPHS not in vars(find_decoder(plain)[1])
    assert restore_(model).layers.keys() == {"kv_cache"}
    assert "forward" not in vars(decoder) and GRAPHS not in vars(decoder)
    assert torch.equal(generate(model, make_prompts(2, 9)), stock)
    apply_(model, FP8)
    assert_same_tokens(model, plain, make_prompts(2, 9))
    ours, decoder.forward = decoder.forward, lambda *args, **call: None
    with pytest.raises(ConfigError, match="undo what replaced it first"):
        restore_(model)
    decoder.forward = ours
    restore_(model)
    assert GRAPHS_FEATURE not in vars(decoder).get("octavo_patches", {})


def test_what_is_said():
    changes = apply_(make_decoder("llama"), FP8)
    assert "generate() replays CUDA graphs" in str(changes) and "about 0.2 s" in str(changes)
    changes = apply_(make_decoder("llama"), FP8, cuda_graphs=False)
    assert changes.graphs == {} and "CUDA graphs" not in str(changes)
    model = make_decoder("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    told = apply_(model, FP8).graphs["kv_cache"]
    assert (
        told == "decode steps run without CUDA graphs: layers.1.mlp has hooks, which a graph "
        "would not call"
    )


def test_a_model_on_a_cpu_is_left_alone(monkeypatch):
    monkeypatch.setattr(decode_graphs, "DEVICES", ("cuda",))
    model, plain = make_pair()
    assert apply_(make_decoder("llama"), FP8).graphs == {}
    assert_same_tokens(model, plain, make_prompts(2, 9))
    assert counts(model) == (0, 0) and len(graphs_of(model).rooms) == 0


def test_what_cannot_be_captured_runs_eagerly(monkeypatch):
    def fail(step, device, pool):
        step()
        raise decode_graphs.NotCapturedError("a capture failed: no such thing")

    model, plain = make_pair()
    prompts = make_prompts(2, 9)
    with monkeypatch.context() as patch:
        patch.setattr(decode_graphs, "record", fail)
        with pytest.warns(UserWarning, match="a capture failed: no such thing"):
            assert_same_tokens(model, plain, prompts, 6)
        assert_same_tokens(model, plain, prompts, 6)
    assert counts(model) == (0, 0) and len(graphs_of(model).rooms) == 0
    model, plain = make_pair()
    with monkeypatch.context() as patch:
        patch.setattr(decode_graphs, "memory_of", lambda device: (0, 0))
        with pytest.warns(UserWarning, match="no memory is free"):
            assert_same_tokens(model, plain, prompts, 6)
    assert_same_tokens(model, plain, prompts, 6)  # by now there is memory
    assert counts(model)[1] > 0
