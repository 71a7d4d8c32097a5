"""The retrieval model: exact at every step, found in BF16 and two-level FP8, lost by one level."""

import pytest
import torch

pytest.importorskip("transformers")

from octavo import Recipe, apply_, ops, restore_
from octavo.demo import retrieval_model as built
from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import load_text_model
from octavo.measure.evaluate.answering import answer_tokens
from octavo.measure.evaluate.needle import PairHaystack
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3
from octavo.numerics.qkv import QkvScales

DEPTHS = (0.0, 0.37, 1.0)


@pytest.fixture(scope="module")
def model():
    return built.make_retrieval_model()


def ask(model, prompt, chunk=2048):
    ids = torch.tensor(built.token_ids(prompt.text.split()))
    (token,) = answer_tokens(model, ids, max_tokens=1, chunk=chunk)
    return built.WORDS[token]


def prompts(length, depths=DEPTHS):
    return [PairHaystack().make(length, depth, seed=length) for depth in depths]


def pairs(prompt):
    """Every token with the one before, [num_tokens, 2]; the first one twice: it has no other."""
    ids = torch.tensor(built.token_ids(prompt.text.split()))
    return torch.stack([torch.cat([ids[:1], ids[:-1]]), ids], 1)


@torch.inference_mode()
def after_first_layer(model, prompt):
    """Hidden states [num_tokens, hidden]: a layer with a window of two sees pairs of tokens."""
    unique, place = pairs(prompt).unique(dim=0, return_inverse=True)
    decoder = model.model
    x = decoder.embed_tokens(unique)
    positions = torch.arange(2)[None]
    hidden = decoder.layers[0](
        x,
        attention_mask=None,
        position_embeddings=decoder.rotary_emb(x, positions),
        position_ids=positions,
    )
    return hidden[:, 1][place]


@torch.inference_mode()
def last_word(model, prompt, promote_every, *, v_scale=1.0):
    """The answer, with layer 1 computed for the last token alone; promote_every: "bf16" is BF16."""
    hidden = after_first_layer(model, prompt)
    layer = model.model.layers[1]
    own = layer.self_attn
    normed = layer.input_layernorm(hidden)
    q = own.q_proj(normed[-1:]).view(1, 1, 1, -1)
    k, v = (project(normed).view(1, len(hidden), 1, -1) for project in (own.k_proj, own.v_proj))
    if promote_every == "bf16":
        out = ops.attention(q, k, v)
    else:
        q_scale = q.abs().max().float() / E4M3.max
        q, k = (q.float() / q_scale).to(E4M3.dtype), k.to(E4M3.dtype)
        v = (v.float() / v_scale).to(E4M3.dtype)
        scales = QkvScales(q_scale, torch.ones(()), torch.tensor(v_scale))
        spec = AttentionSpec(promote_every=promote_every)
        out = ops.attention(q, k, v, spec, scales, out_dtype=torch.bfloat16)
    final = hidden[-1:] + own.o_proj(out.view(1, -1))
    logits = model.lm_head(model.model.norm(final))[0]
    return built.WORDS[int(logits.argmax())], float(out.flatten()[0])


def test_norms_change_nothing(model):
    rows = model.model.embed_tokens.weight.float()
    assert torch.equal(rows.square().mean(1), torch.ones(len(rows)))
    hidden = after_first_layer(model, prompts(200)[1]).float()
    assert torch.equal(hidden.square().mean(1), torch.ones(len(hidden)))


def test_values_take_on_the_code_of_their_key_and_nothing_else_does(model):
    prompt = prompts(33)[1]
    words = prompt.text.split()
    hidden = after_first_layer(model, prompt)[:, list(built.SEEN_CODE)]
    rows = model.model.embed_tokens.weight[:, list(built.OWN_CODE)]
    for place, word in enumerate(words):
        source = words[place - 1] if word in built.VALUES else built.START
        assert torch.equal(hidden[place], rows[built.token_ids([source])[0]]), (place, word)


def test_all_operands_are_exact_in_bf16_and_e4m3(model):
    hidden = after_first_layer(model, prompts(300)[1])
    own = model.model.layers[1].self_attn
    normed = model.model.layers[1].input_layernorm(hidden)
    for project in (own.k_proj, own.v_proj):
        x = project(normed)
        assert torch.equal(x.to(E4M3.dtype).to(x.dtype), x)
        assert torch.equal(x.float(), (normed.float() @ project.weight.float().T))
    q = own.q_proj(normed)
    assert torch.equal(q.abs(), torch.where(q == 0, 0, built.MATCH).to(q.dtype))


def test_keys_are_orthogonal_and_the_match_is_a_power_of_two():
    rows = built.make_retrieval_model(torch.float32).model.embed_tokens.weight
    codes = rows[built.token_ids(list(built.KEYS))][:, list(built.OWN_CODE)]
    products = codes @ codes.T
    assert set(products.unique().tolist()) == {-32.0, 0.0, 32.0}
    assert (products == 32).sum() == len(built.KEYS)
    logit = torch.tensor(built.CODE * built.MATCH / built.HEAD_DIM**0.5, dtype=torch.float64)
    assert abs(float(logit.exp()) / built.NEEDLE_WEIGHT - 1) < 5e-4


@pytest.mark.parametrize("length", [5, 6, 64, 701])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_model_answers(length, dtype):
    model = built.make_retrieval_model(dtype)
    for prompt in prompts(length):
        assert ask(model, prompt) == prompt.answer


def test_chunks_change_nothing(model):
    for prompt in prompts(301):
        assert ask(model, prompt, chunk=64) == prompt.answer


@pytest.mark.parametrize(
    "settings", [{"scaling": "unit"}, {"granularity": "token"}, {"rotate_keys": True}], ids=str
)
def test_an_fp8_cache_finds_the_needle(model, settings):
    settings = {"scaling": "unit", **settings} if "granularity" not in settings else settings
    apply_(model, Recipe(kv_cache=settings))
    try:
        for prompt in prompts(150):
            assert ask(model, prompt, chunk=64) == prompt.answer
    finally:
        restore_(model)


def test_the_last_row_alone_is_what_the_model_computes(model):
    for prompt in prompts(99):
        assert last_word(model, prompt, "bf16") == (prompt.answer, 1.0)
        assert last_word(model, prompt, 1) == (prompt.answer, 1.0)
        assert last_word(model, prompt, None) == (prompt.answer, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "depth"),
    [(16384, 0.37), (32768, 0.37), (65536, 0.37), *((131072, depth) for depth in DEPTHS)],
)
def test_one_level_loses_the_needle_from_64k_on(model, length, depth):
    prompt = PairHaystack().make(length, depth, seed=length)
    assert last_word(model, prompt, "bf16") == (prompt.answer, 1.0)
    assert last_word(model, prompt, 1) == (prompt.answer, 1.0)
    word, mass = last_word(model, prompt, None)
    assert word == (prompt.answer if length <= 32768 else built.NOTHING)
    # What is left of the sum of all probabilities: 2¹⁴ of the needle's 2048 and all others.
    expected = min(1.0, built.SUM_LIMIT / (length + built.NEEDLE_WEIGHT))
    assert expected * 0.85 <= mass <= min(1.0, expected * 1.2)


@pytest.mark.slow
def test_scales_with_a_margin_and_a_million_tokens_are_within_the_budget(model):
    for length in (131072, 2**20):
        prompt = PairHaystack().make(length, 0.4, seed=3)
        assert last_word(model, prompt, 1, v_scale=1.5 / 448)[0] == prompt.answer
        assert last_word(model, prompt, "bf16") == (prompt.answer, 1.0)


def test_a_saved_model_is_the_same(tmp_path, model):
    built.save_retrieval_model(tmp_path)
    loaded = load_text_model(str(tmp_path), device="cpu")
    assert loaded.dtype == "bf16" and loaded.max_length == 2**24
    for prompt in prompts(64):
        ids = torch.tensor(loaded.tokenizer(prompt.text)["input_ids"])
        assert ids.tolist() == built.token_ids(prompt.text.split())
        (token,) = answer_tokens(loaded.model, ids, max_tokens=1)
        assert loaded.tokenizer.decode([token]) == prompt.answer


def test_unknown_words_are_refused():
    with pytest.raises(ConfigError, match="expected words of the retrieval model, got haystack"):
        built.token_ids(["<s>", "haystack"])


@pytest.mark.gpu
@pytest.mark.parametrize("depth", DEPTHS)
def test_at_128k_tokens_one_level_loses_the_needle_on_a_gpu(depth):
    text_model = built.load_retrieval_model(device="cuda")
    prompt = PairHaystack().make(131072, depth, seed=0)
    assert ask(text_model.model, prompt) == prompt.answer
    answers = {}
    for promote_every in (1, None):
        recipe = Recipe(kv_cache={"scaling": "unit"}, promote_every=promote_every)
        apply_(text_model.model, recipe)
        try:
            answers[promote_every] = ask(text_model.model, prompt)
        finally:
            restore_(text_model.model)
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert answers == {1: prompt.answer, None: built.NOTHING if is_hopper else answers[None]}
