"""generate() by CUDA graphs on a GPU: the tokens and logits of eager steps, bit for bit."""

import gc
import warnings

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaMLP

from octavo import Recipe, apply_, restore_
from octavo.integrations.transformers import cache_rooms
from octavo.integrations.transformers.cache_rooms import GRAPHS
from octavo.layers.experts import Fp8ExpertLinear
from octavo.testing.asserts import assert_no_waiting
from octavo_testkit.models.text_models import make_decoder, make_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:the model brings no scales"),
    pytest.mark.filterwarnings("ignore:.*cudaMalloc.*"),
]
RECIPES = {
    "kv": Recipe(kv_cache="fp8"),
    "token": Recipe(kv_cache={"granularity": "token"}),
    "kv + linear": Recipe(kv_cache="fp8", linear="fp8"),
}
# Launch settings follow the room of a cache. For 257 to 2048 tokens they are the same, so that a
# larger room changes no bit.
LENGTH = 300


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def make_pair(family="llama", recipe=RECIPES["kv"]):
    made = [make_decoder(family, torch.bfloat16, head_dim=64).to("cuda") for _ in range(2)]
    changes = apply_(made[0], recipe)
    apply_(made[1], recipe, cuda_graphs=False)
    assert "generate() replays CUDA graphs" in str(changes)
    return made


def graphs_of(model):
    return vars(model.model)[GRAPHS]


def counts(model):
    graphs = graphs_of(model)
    return graphs.num_captures, graphs.num_replays


def generate(model, prompts, num_tokens=40, **options):
    torch.manual_seed(3)
    inputs = {name: x.cuda() for name, x in prompts.items()}
    options = {"do_sample": False, "output_logits": True, **options}
    options |= {"max_new_tokens": num_tokens, "return_dict_in_generate": True}
    return model.generate(**inputs, **options)


def assert_same(model, plain, prompts, num_tokens=40, **options):
    found = generate(model, prompts, num_tokens, **options)
    expected = generate(plain, prompts, num_tokens, **options)
    assert torch.equal(found.sequences, expected.sequences)
    if "num_beams" not in options:  # which may differ in rows that no beam comes from
        assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_tokens_and_logits_are_those_of_eager_steps(family, recipe):
    model, plain = make_pair(family, RECIPES[recipe])
    num_replays = 0
    for batch in (1, 3):  # with padding on the left, over the end of a page at 320
        prompts = make_prompts(batch, LENGTH)
        assert_same(model, plain, prompts)
        assert_same(model, plain, prompts, do_sample=True, top_p=0.9)
        num_replays += 38 + 39
        assert counts(model) == (1 if batch == 1 else 2, num_replays)


def test_experts_are_replayed_or_it_is_told():
    """Some implementations of experts wait for the device."""
    model, plain = make_pair("gpt_oss")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert_same(model, plain, make_prompts(3, LENGTH))
    is_told = any("without CUDA graphs" in str(one.message) for one in told)
    assert is_told == (counts(model)[1] == 0)


def test_fp8_experts_are_replayed():
    """Their routing is found on the device; no step waits for it."""
    model, plain = make_pair("gpt_oss", RECIPES["kv + linear"])
    assert any(isinstance(module, Fp8ExpertLinear) for module in model.modules())
    assert_same(model, plain, make_prompts(3, LENGTH))
    assert counts(model) == (1, 38)


def test_beams():
    model, plain = make_pair()
    assert_same(model, plain, make_prompts(2, LENGTH), 12, num_beams=3)
    assert counts(model)[1] > 0


def test_a_room_grows(monkeypatch):
    monkeypatch.setattr(cache_rooms, "MIN_GROWTH_TOKENS", 32)
    model, plain = make_pair()
    with torch.inference_mode():
        assert_same(model, plain, make_prompts(3, LENGTH), 200)  # rooms of 384, 512 tokens
    num_captures, num_replays = counts(model)
    assert num_captures == 2 and num_replays == 198
    assert_same(model, plain, make_prompts(3, LENGTH, seed=5), 200)  # in the last one's room
    assert counts(model) == (2, 198 + 199)


def test_a_replayed_step_waits_for_nothing():
    model, _ = make_pair()
    cache = DynamicCache(config=model.config)
    ids = make_prompts(1, LENGTH)["input_ids"].cuda()
    mask, positions = torch.ones_like(ids), torch.arange(LENGTH, device="cuda")[None]
    model(ids[:, :-4], attention_mask=mask[:, :-4], past_key_values=cache)
    for place in range(LENGTH - 4, LENGTH):
        step = {
            "input_ids": ids[:, place : place + 1],
            "attention_mask": mask[:, : place + 1],
            "position_ids": positions[:, place : place + 1],
        }
        if place < LENGTH - 2:
            model(**step, past_key_values=cache)
            torch.cuda.synchronize()
            continue
        with assert_no_waiting():
            model(**step, past_key_values=cache)
    assert counts(model) == (1, 3)


def move_and_back(model):
    model.to("cpu")
    model.to("cuda")


def swap_data(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data = 1.5 * layer.mlp.up_proj.weight.data


def load_weights(model):
    state = {n: 1.5 * x for n, x in model.state_dict().items() if n.endswith("v_proj.weight")}
    model.load_state_dict(state, strict=False)


@pytest.mark.parametrize("change", [move_and_back, swap_data, load_weights])
def test_no_graph_survives_its_weights(change):
    model, plain = make_pair()
    prompts = make_prompts(2, LENGTH)
    assert_same(model, plain, prompts, 8)
    for each in (model, plain):
        change(each)
    assert_same(model, plain, prompts, 8)
    assert counts(model)[1] >= 12


def test_memory_is_bounded_and_given_back():
    model, _ = make_pair()
    for batch in range(1, 11):
        generate(model, make_prompts(batch, 20), 4)
    gc.collect()
    rooms = graphs_of(model).rooms
    assert len(rooms) == cache_rooms.MAX_ROOMS
    kept, before = rooms.kept_bytes, torch.cuda.memory_allocated()
    del rooms
    restore_(model)
    gc.collect()
    assert kept > 2**20 and before - torch.cuda.memory_allocated() >= kept


@pytest.mark.parametrize("waits", [lambda x: x.sum().item(), lambda x: torch.cuda.synchronize()])
def test_a_step_that_waits_runs_eagerly(waits, monkeypatch):
    """Whether torch sees that it waits, or the capture itself fails of it; sampling goes on."""
    own = LlamaMLP.forward

    def forward(self, x):
        waits(x)
        return own(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    model, plain = make_pair()
    prompts = make_prompts(2, LENGTH)
    with pytest.warns(UserWarning, match="decode steps run without CUDA graphs: a "):
        assert_same(model, plain, prompts, 8, do_sample=True)
    assert_same(model, plain, prompts, 8, do_sample=True)
    assert counts(model) == (0, 0)
    monkeypatch.undo()
    model, plain = make_pair()
    assert_same(model, plain, prompts, 8, do_sample=True)
    assert counts(model)[1] == 6
