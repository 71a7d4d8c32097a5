"""octavo.LLM: lists of prompts in, answers in the same order out."""

import json

import pytest

pytest.importorskip("transformers")
import octavo
from octavo.errors import ConfigError, OctavoError
from octavo_testkit.models.text_models import make_tokenizer, save_decoder
from octavo_testkit.serving.tiny_engine import (
    SETTINGS,
    finish,
    make_model,
    make_prompt,
    make_request,
    tokenizer,
)

GREEDY = octavo.Sampling(temperature=0, max_tokens=5)


@pytest.fixture
def llm():
    settings = octavo.EngineSettings(**SETTINGS, max_queue=2)
    with octavo.LLM(make_model(), settings=settings, tokenizer=tokenizer()) as made:
        yield made


def test_answers_come_in_the_order_of_their_prompts(llm):
    prompts = [make_prompt(length, which=length) for length in (40, 3, 17, 1, 8, 30)]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert len({one.tokens for one in together}) > 3
    assert llm.generate([], GREEDY) == []


def test_texts_are_prompts_too(llm):
    ids = tokenizer().encode("the keys and values")
    by_text, by_tokens = llm.generate(["the keys and values", ids], GREEDY)
    assert by_text.tokens == by_tokens.tokens
    assert by_text.text == tokenizer().decode(list(by_text.tokens))


def test_each_prompt_may_have_its_own_sampling(llm):
    prompts = [make_prompt(5), make_prompt(5)]
    each = [GREEDY, octavo.Sampling(temperature=0, max_tokens=2)]
    assert [len(one.tokens) for one in llm.generate(prompts, each)] == [5, 2]
    with pytest.raises(ConfigError, match="each of 2 prompts, got 1"):
        llm.generate(prompts, each[:1])


def test_a_prompt_that_can_never_run_raises_before_any_runs(llm):
    with pytest.raises(ConfigError, match="context of 512"):
        llm.generate([make_prompt(5), make_prompt(600)], GREEDY)
    assert llm.engine.stats().num_steps == 0
    with pytest.raises(ConfigError, match="put it in a list"):
        llm.generate("the keys", GREEDY)


def test_a_failure_raises_and_leaves_the_engine_clean(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._runner, "run", lambda batch: 1 / 0)
        with pytest.raises(OctavoError, match="division by zero"):
            llm.generate([make_prompt(5)] * 6, GREEDY)
    assert llm.engine.stats().num_pages_in_use == 0
    assert len(llm.generate([make_prompt(5)], GREEDY)[0].tokens) == 5


def test_open_requests_are_not_lost(llm):
    llm.engine.add(make_request("mine"))
    with pytest.raises(ConfigError, match="without open requests"):
        llm.generate([make_prompt(5)], GREEDY)
    (done,) = finish(llm.engine, ["mine"])
    assert done.finish_reason == "length"


def test_progress_is_shown_when_asked_for(llm, capsys):
    llm.generate([make_prompt(5)] * 3, GREEDY)
    assert capsys.readouterr().out == ""
    llm.generate([make_prompt(5)] * 3, GREEDY, show_progress=True)
    assert "3/3" in capsys.readouterr().out


def test_a_model_by_its_folder(tmp_path):
    model = make_model(vocab_size=300)
    folder = str(save_decoder(tmp_path, model))
    settings = octavo.EngineSettings(**SETTINGS)
    with octavo.LLM(folder, settings=settings) as llm:
        assert llm.engine.model_name == folder
        loaded = llm.generate(["abc"], GREEDY)
    with octavo.LLM(model, settings=settings, tokenizer=llm.engine.tokenizer) as other:
        assert other.generate(["abc"], GREEDY)[0].tokens == loaded[0].tokens
    with pytest.raises(ConfigError, match="got one that is loaded"):
        octavo.LLM(model, dtype="bfloat16")
    with octavo.LLM(model, settings=settings) as bare, pytest.raises(ConfigError, match="tokenize"):
        bare.generate(["abc"])


def test_add_bos_and_a_chat_template():
    chat = [{"role": "user", "content": "Hi"}]
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    options = {"settings": octavo.EngineSettings(**SETTINGS), "tokenizer": tokenizer()}
    bos, ids = tokenizer().bos_token_id, tokenizer().encode
    with octavo.LLM(make_model(), add_bos=True, chat_template=template, **options) as llm:
        by_text, by_chat, *by_tokens = llm.generate(
            ["Hi", {"prompt": chat}, [bos, *ids("Hi")], [bos, *ids("<Hi>")]], GREEDY
        )
    assert [by_text.tokens, by_chat.tokens] == [one.tokens for one in by_tokens]
    with pytest.raises(ConfigError, match="expected a chat template that writes a user's message"):
        octavo.LLM(make_model(), chat_template="{{ messages", **options)
    with pytest.raises(ConfigError, match="need a tokenizer"):
        octavo.LLM(make_model(), add_bos=True)


def test_a_chat_without_a_template(llm):
    llm.engine.tokenizer = make_tokenizer(chat_template=None)
    with pytest.raises(ConfigError, match=r"the model has no chat template: .*chat_template=…"):
        llm.generate([{"prompt": [{"role": "user", "content": "Hi"}]}], GREEDY)


def test_a_folder_whose_tokenizer_drops_bos_is_warned_of(tmp_path):
    save_decoder(tmp_path, make_model())
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    settings = octavo.EngineSettings(**SETTINGS)
    with pytest.warns(UserWarning, match="text prompts start without the BOS token '<s>'"):
        octavo.LLM(str(tmp_path), settings=settings, device="cpu").close()
    with octavo.LLM(str(tmp_path), settings=settings, device="cpu", add_bos=True) as llm:
        assert llm.engine.tokenizer("Hi")["input_ids"][0] == 1
