"""Decoders' attention modules whose forward hands its projections straight to paged layers."""

import copy
import functools
import inspect
import pickle
from importlib import import_module

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, StaticCache

from octavo import Recipe, apply_, ops, restore_
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers import fused_decoder, kv_cache
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.counting import num_function_calls
from octavo_testkit.models.text_models import make_decoder, make_prompts

pytestmark = pytest.mark.filterwarnings("ignore:the model brings no scales")

LLAMA = "transformers.models.llama.modeling_llama"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
FP8 = Recipe(kv_cache="fp8")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def make(family, dtype=torch.float32, **changes):
    if family == "qwen2":  # of its four layers, the last two have windows
        changes |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    return make_decoder(family, dtype, **changes)


@pytest.fixture
def unfused(monkeypatch):
    """Give a model its cache without another forward."""

    def apply(model, recipe=FP8):
        with monkeypatch.context() as patch:
            patch.setattr(fused_decoder, "find_forward", lambda module: None)
            changes = apply_(model, recipe)
        assert not changes.fused["kv_cache"] and not kv_cache.find_fused(model)
        return model

    return apply


def modules_of(model):
    return [layer.self_attn for layer in model.model.layers]


def in_parts(model, prompts, splits, cache=None):
    """Logits of all columns, the prompt given in parts that end at `splits`."""
    mask, parts, start = prompts["attention_mask"], [], 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for stop in (*splits, mask.shape[1]):
        result = model(
            input_ids=prompts["input_ids"][:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            past_key_values=cache,
            use_cache=True,
        )
        cache, start = result.past_key_values, stop
        parts.append(result.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_and_restored(family):
    model = make(family)
    before = [dict(vars(module)) for module in modules_of(model)]
    parameters = list(inspect.signature(modules_of(model)[0].forward).parameters)
    changes = apply_(model, FP8)
    assert changes.fused["kv_cache"] == changes.layers["kv_cache"] != []
    assert f"{len(before)} layers, {len(before)} of them fused" in str(changes)
    for module in modules_of(model):
        assert list(inspect.signature(module.forward).parameters) == parameters
    restore_(model)
    assert not kv_cache.find_fused(model)
    assert [vars(module) for module in modules_of(model)] == before


@pytest.mark.parametrize("settings", [None, "fp8", {"granularity": "token"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_as_unfused(family, settings, unfused, monkeypatch):
    """The same bits in float32, where nothing is rounded before the cache.

    Sequences are padded on the left, and the parts end in pages and windows.
    """
    model, prompts, outputs = make(family), make_prompts(3, 330), []
    splits = (*(5, 64, 65, 290), *range(326, 330))
    for is_fused in (False, True):
        with monkeypatch.context() as patch:
            if not is_fused:
                patch.setattr(fused_decoder, "find_forward", lambda module: None)
            if settings is None:
                kv_cache.attach(model, None)
            else:
                apply_(model, Recipe(kv_cache=settings))
        assert all(fused_decoder.is_fused(m) == is_fused for m in modules_of(model))
        outputs.append(in_parts(model, prompts, splits))
        kv_cache.detach(model)
    assert_same_bits(*outputs)


def test_a_wrong_rotation_would_show(monkeypatch):
    model, prompts = make("llama"), make_prompts(2, 20)
    apply_(model, FP8)
    expected = in_parts(model, prompts, (10, 11))
    from octavo.integrations.transformers import paged_cache

    def backwards(self, tables, *args):
        return rotary(self, tuple(reversed(tables)), *args)

    rotary = paged_cache.Pass.rotary
    monkeypatch.setattr(paged_cache.Pass, "rotary", backwards)
    assert (in_parts(model, prompts, (10, 11)) - expected).norm() / expected.norm() > 0.1


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_in_bf16_one_rounding_less(family, unfused):
    """What FP8 does to the result is the same, and nothing is rounded in front of it."""
    prompts = make_prompts(2, 100)
    exact = make(family)(**prompts).logits
    real = prompts["attention_mask"].bool()

    def error(model):
        found = in_parts(model, prompts, (98, 99)).float()
        return float((found[real] - exact[real]).norm() / exact[real].norm())

    fused, other = make(family, torch.bfloat16), make(family, torch.bfloat16)
    apply_(fused, FP8)
    assert 0 < error(fused) < 1.1 * error(unfused(other)) < 0.3


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_the_tokens_of_the_unfused_path(family, way, unfused):
    model, prompts = make(family), make_prompts(2, 20)
    options = {"max_new_tokens": 12, "do_sample": False, **WAYS[way]}
    expected = unfused(model).generate(**prompts, **options)
    assert len(expected[:, 20:].unique()) > 2
    restore_(model)
    apply_(model, FP8)
    assert torch.equal(model.generate(**prompts, **options), expected)


@pytest.mark.parametrize("num_columns", [1, 20])
def test_one_append_per_layer_turns_everything(num_columns, monkeypatch):
    """By tables that are views of the model's, made once for all layers."""
    model, prompts = make("llama"), make_prompts(2, 40)
    apply_(model, FP8)
    cache, calls, tables = DynamicCache(config=model.config), [], []
    in_parts(model, prompts, (), cache)
    append = ops.append_kv

    def record(*args, **options):
        calls.append(options)
        return append(*args, **options)

    def refuse(*args, **options):
        raise AssertionError("turned by the model")

    def see(module, args, options):
        tables.append(options["position_embeddings"])

    monkeypatch.setattr(ops, "append_kv", record)
    monkeypatch.setattr(import_module(LLAMA), "apply_rotary_pos_emb", refuse)
    for module in modules_of(model):
        module.register_forward_pre_hook(see, with_kwargs=True)
    model(input_ids=prompts["input_ids"][:, :num_columns], past_key_values=cache)
    assert len(calls) == len(tables) == 4
    assert len({id(options["rotary"]) for options in calls}) == 1
    assert [tuple(options["query"].shape) for options in calls] == [(2 * num_columns, 4, 16)] * 4
    rotary = calls[0]["rotary"]
    for table, full in zip((rotary.cos, rotary.sin), tables[0], strict=True):
        assert table.data_ptr() == full.data_ptr() and table.shape == (num_columns, 8)
        assert_same_bits(full[..., :8], full[..., 8:])


def test_positions_of_a_batch_have_tables_of_their_own(unfused):
    """Sequences of other lengths: rows for every token of the batch."""
    model, ids = make("qwen3"), make_prompts(1, 30)["input_ids"].repeat(2, 1)
    positions = torch.stack([torch.arange(30), torch.arange(30) + 7])
    expected = unfused(model)(ids, position_ids=positions).logits
    restore_(model)
    apply_(model, FP8)
    assert_same_bits(model(ids, position_ids=positions).logits, expected)
    assert not torch.equal(expected[0], model(ids, position_ids=positions.flip(0)).logits[0])


def test_saturation_is_counted(unfused):
    model, prompts = make("llama"), make_prompts(2, 20)
    for module in modules_of(model):
        module.k_proj.weight.mul_(1e4)
    counts = []
    for apply in (unfused, lambda model: apply_(model, FP8)):
        apply(model)
        model(**prompts)
        counts.append([m.octavo_attention.saturated.tolist() for m in modules_of(model)])
        restore_(model)
    assert counts[0] == counts[1] and counts[0][0][0] > 0


def test_layers_that_change_keys_keep_their_forward():
    model = make("llama")
    changes = apply_(model, Recipe(kv_cache={"granularity": "token", "rotate_keys": True}))
    assert changes.layers["kv_cache"] and not changes.fused["kv_cache"]
    assert not any("forward" in vars(module) for module in modules_of(model))


def test_skipped_layers_are_fused_and_not_listed():
    model = make("llama")
    changes = apply_(model, Recipe(kv_cache="fp8", skip_layers=["0"]))
    assert changes.fused == changes.layers and len(changes.fused["kv_cache"]) == 3
    assert all(map(fused_decoder.is_fused, modules_of(model)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_without_a_cache_the_module_runs_its_own(family, unfused, monkeypatch):
    model, prompts = make(family), make_prompts(2, 20)
    real = prompts["attention_mask"].bool()
    stock = model(**prompts, use_cache=False).logits[real]
    expected = unfused(model)(**prompts, use_cache=False).logits
    restore_(model)
    apply_(model, FP8)
    monkeypatch.setattr(ops, "append_kv", None)
    assert_same_bits(model(**prompts, use_cache=False).logits, expected)
    torch.testing.assert_close(expected[real], stock, rtol=1e-4, atol=2e-5)
    module = modules_of(model)[0]
    with pytest.raises(TypeError):  # as the class has it
        module(torch.zeros(1, 1, 64), position_embeddings=None)


def test_a_cache_with_an_update_of_its_own_is_asked():
    class Listening(DynamicCache):
        def update(self, *args, **kwargs):
            seen.append(args[2])
            return super().update(*args, **kwargs)

    model, prompts, seen = make("llama"), make_prompts(2, 20), []
    apply_(model, FP8)
    expected = model(**prompts).logits
    assert_same_bits(model(**prompts, past_key_values=Listening()).logits, expected)
    cache = DynamicCache(config=model.config)
    update = cache.update
    cache.update = lambda *args, **kwargs: seen.append(args[2]) or update(*args, **kwargs)
    assert_same_bits(model(**prompts, past_key_values=cache).logits, expected)
    assert seen == [0, 1, 2, 3] * 2


def _subclass(kind):
    """A class of the same name with a forward of its own."""

    def forward(self, *args, **options):
        out, weights = kind.forward(self, *args, **options)
        return 2 * out, weights

    return type(kind.__name__, (kind,), {"forward": forward})


def _wrapped(kind):
    """A class whose forward is a decorated one."""

    @functools.wraps(kind.forward)
    def forward(self, *args, **options):
        out, weights = kind.forward(self, *args, **options)
        return 2 * out, weights

    return type(kind.__name__, (kind,), {"forward": forward})


@pytest.mark.parametrize("change", [_subclass, _wrapped])
def test_another_forward_is_kept(change):
    """Pages come by the attention function there, and what the class adds is not lost."""
    model, prompts = make("llama"), make_prompts(2, 20)
    apply_(model, FP8)
    before = model(**prompts).logits
    restore_(model)
    modules_of(model)[1].__class__ = change(type(modules_of(model)[1]))
    changes = apply_(model, FP8)
    assert "model.layers.1.self_attn" not in changes.fused["kv_cache"]
    assert len(changes.fused["kv_cache"]) == 3
    assert (model(**prompts).logits - before).abs().max() > 1e-2


def test_modules_with_more_in_them_are_not_fused():
    first, second, third, _ = modules_of(make("llama"))
    first.q_norm = torch.nn.LayerNorm(16)
    second.forward = lambda *args, **options: type(second).forward(second, *args, **options)
    assert fused_decoder.find_forward(first) is None
    assert fused_decoder.find_forward(second) is None
    assert fused_decoder.find_forward(third) is not None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_runs_by_itself(duplicate):
    model, prompts = make("qwen3"), make_prompts(2, 10)
    apply_(model, FP8)
    expected, twin = model(**prompts).logits, duplicate(model)
    for parameter in model.parameters():
        parameter.zero_()
    assert_same_bits(twin(**prompts).logits, expected)
    restore_(twin)
    assert not kv_cache.find_fused(twin) and len(kv_cache.find_fused(model)) == 4


@pytest.fixture
def call():
    """One call of the first attention module, by itself: of 2 sequences and 6 columns."""
    model = make("mistral")
    apply_(model, FP8)
    module, given = modules_of(model)[0], {}

    def see(module, args, options):
        given.update(options)

    handle = module.register_forward_pre_hook(see, with_kwargs=True)
    model(**make_prompts(2, 6))
    handle.remove()
    given["past_key_values"].reset()
    given["octavo_pass"].steps.clear()
    module(**given)  # as it is, the call is good
    return module, given


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"is_causal": False}, UnsupportedError, "expected a causal call"),
        ({"dropout": 0.5}, UnsupportedError, "for inference, got dropout"),
        ({"softcap": 2.0}, UnsupportedError, r"cap and window \(0.25, None, 8\), got .* 2.0, 8"),
        ({"sliding_window": 4}, UnsupportedError, r"cap and window .*, got .* None, 4\)"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, UnsupportedError, r"got .* \[2, 1, 6, 6\]"),
        (
            {"position_embeddings": (torch.ones(1, 6, 8), torch.ones(1, 6, 8))},
            ConfigError,
            r"of shape \[1 or 2, 6, 16\], got \[1, 6, 8\] and \[1, 6, 8\]",
        ),
        ({"position_embeddings": (torch.ones(3, 6, 16),) * 2}, ConfigError, r"got \[3, 6, 16\]"),
    ],
)
def test_calls_that_are_refused(options, error, message, call):
    module, given = call
    with pytest.raises(error, match=message):
        module(**{**given, **options})


@pytest.mark.parametrize(
    ("name", "value"), [("scaling", 0.5), ("attention_dropout", 0.1), ("config", 4)]
)
def test_changes_since_are_refused(name, value, call):
    module, given = call
    if name == "config":
        module.config.sliding_window = value
    else:
        setattr(module, name, value)
        module.train()
    with pytest.raises(UnsupportedError, match="expected softmax scale|for inference"):
        module(**given)


def test_a_module_that_lost_its_layer_is_refused(call):
    module, given = call
    del module.octavo_attention
    with pytest.raises(UnsupportedError, match="expected a layer that apply_ reached"):
        module(**given)


def test_another_attention_in_the_config_is_refused():
    """It would be given new keys alone, and a fused forward would not ask it at all."""
    model, prompts = make("llama"), make_prompts(2, 10)
    apply_(model, FP8)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="got 'sdpa': restore_ the model first"):
        model(**prompts)
    model.set_attn_implementation("octavo")
    model(**prompts)


def test_sinks_of_a_call_are_used(unfused):
    model, prompts = make("llama"), make_prompts(2, 10)
    sinks = torch.tensor([1.0, 2.0, 0.0, 3.0])
    expected = unfused(model)(**prompts, s_aux=sinks).logits
    restore_(model)
    apply_(model, FP8)
    assert_same_bits(model(**prompts, s_aux=sinks).logits, expected)
    assert not torch.equal(model(**prompts).logits, expected)


def test_a_static_step_compiles_in_one_graph(unfused):
    model, ids = make("llama", num_hidden_layers=2), make_prompts(2, 12)["input_ids"]
    apply_(model, FP8)

    def run(step):
        cache = StaticCache(config=model.config, max_cache_len=64)
        found = [model(ids, past_key_values=cache).logits[:, -1:]]
        for _ in range(3):
            result = step(input_ids=found[-1].argmax(-1), past_key_values=cache)
            found.append(result.logits)
        return torch.cat(found, 1)

    expected, graphs = run(model), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    assert torch.equal(run(torch.compile(model, backend=backend, fullgraph=True)), expected)
    assert len(graphs) == 1
    code = graphs[0].code
    assert code.count("torch.ops.octavo.append_kv") == 2


# Of one layer's attention in a decode step beside its projections and ops, which are others' work;
# by the module's own forward and the attention function it would be 118.
MAX_FUNCTION_CALLS = 78


def test_the_host_work_of_a_layer_is_bounded(monkeypatch):
    """Functions are counted: time would vary with the machine."""
    model, prompts = make("llama"), make_prompts(1, 20)
    apply_(model, FP8)
    with torch.inference_mode():
        cache = model(**prompts).past_key_values
        module, calls = modules_of(model)[2], []
        module.register_forward_pre_hook(
            lambda module, args, options: calls.append(options), with_kwargs=True
        )
        mask = torch.ones(1, 21, dtype=torch.int64)
        model(prompts["input_ids"][:, :1], attention_mask=mask, past_key_values=cache)
        monkeypatch.setattr(ops, "append_kv", lambda *args, query, **options: query)
        monkeypatch.setattr(ops, "decode_attention", lambda q, *args, **options: q)
        (given,) = calls
        x = given.pop("hidden_states")
        projections = [getattr(module, f"{name}_proj") for name in "qkvo"]

        def project():
            for projection in projections:
                projection(x)

        total = num_function_calls(lambda: module.forward(x, **given))
    assert total - num_function_calls(project) <= MAX_FUNCTION_CALLS
