"""Prompts as tokens: BOS once or not at all, chat templates that work, warnings where in doubt."""

import json
import warnings

import pytest

pytest.importorskip("transformers")

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers.text_model import load_text_model
from octavo.integrations.transformers.tokenizer import (
    PromptSettings,
    chat_tokens,
    prepare_tokenizer,
    text_tokens,
)
from octavo_testkit.models import text_models

BOS = 1
HELLO = [{"role": "user", "content": "Hello"}]
WITH_BOS = "{{ bos_token }}" + text_models.TEMPLATE


def save(folder, family="llama", config=None, template=text_models.TEMPLATE, **sizes):
    """A checkpoint whose tokenizer does not add BOS; config: added to tokenizer_config.json."""
    model = text_models.make_decoder(family, vocab_size=258, **sizes)
    text_models.save_decoder(folder, model, has_bos=False, num_tokens=258, chat_template=template)
    path = folder / "tokenizer_config.json"
    saved = json.loads(path.read_text())
    saved.pop("add_bos_token", None)
    path.write_text(json.dumps(saved | (config or {})))
    return str(folder)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"family": "qwen3", "config": {"add_bos_token": True}}, "add_bos_token: true"),
        ({"family": "qwen3", "template": WITH_BOS}, "its chat template writes it"),
        ({}, "bos_token_id 1"),
    ],
    ids=["tokenizer_config", "chat template", "config"],
)
def test_a_tokenizer_that_drops_bos_is_named(tmp_path, options, reason):
    with pytest.warns(UserWarning, match="without the BOS token '<s>'.*--add-bos") as found:
        load_text_model(save(tmp_path, **options), device="cpu")
    assert len(found) == 1 and reason in str(found[0].message)


@pytest.mark.parametrize(
    "options",
    [
        {"config": {"add_bos_token": False}},
        {"family": "qwen3"},
        {"bos_token_id": 5},
        {"template": "{% for m in messages %}<s>{{ m.content }}{% endfor %}"},
        {"config": {"eos_token": "<s>"}},
    ],
    ids=["says no", "family without BOS", "another token", "a mark of chats", "BOS is EOS"],
)
def test_no_warning_where_nothing_asks_for_bos(tmp_path, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text_model = load_text_model(save(tmp_path, **options), device="cpu")
    assert text_tokens(text_model.tokenizer, "Hello")[0] != BOS


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("has_bos", [True, False])
def test_add_bos_decides_for_texts_windows_and_chats(tmp_path, add_bos, has_bos):
    model = text_models.make_decoder("llama", vocab_size=258)
    text_models.save_decoder(tmp_path, model, has_bos=has_bos, num_tokens=258)
    prompts = PromptSettings(add_bos=add_bos)
    text_model = load_text_model(str(tmp_path), device="cpu", prompts=prompts)
    plain = text_tokens(text_model.tokenizer, "Hello", add_special_tokens=False)
    front = (BOS,) if add_bos else ()
    assert text_tokens(text_model.tokenizer, "Hello") == (*front, *plain)
    (window,) = text_model.windows("Hello, Hello", 6, 1)
    assert (int(window[0]) == BOS) == add_bos
    chat = text_tokens(text_model.tokenizer, "<|user|>Hello\n", add_special_tokens=False)
    assert chat_tokens(text_model.tokenizer, HELLO) == (*front, *chat)


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("template", [WITH_BOS, "<s>" + text_models.TEMPLATE])
def test_a_template_that_writes_bos_writes_the_only_one(add_bos, template):
    settings = PromptSettings(add_bos=add_bos, chat_template=template)
    tokenizer = prepare_tokenizer(text_models.make_tokenizer(), settings)
    assert chat_tokens(tokenizer, HELLO).count(BOS) == 1
    # A client that applies the template itself sends BOS as text.
    assert text_tokens(tokenizer, "<s>Hello").count(BOS) == 1


def test_the_tokenizer_that_was_given_stays_as_it_is():
    given = text_models.make_tokenizer(has_bos=False, chat_template=None)
    settings = PromptSettings(add_bos=True, chat_template=text_models.TEMPLATE)
    assert text_tokens(prepare_tokenizer(given, settings), "a")[0] == BOS
    assert text_tokens(given, "a")[0] != BOS and given.chat_template is None


def test_bos_that_cannot_be_added():
    tokenizer = text_models.make_tokenizer(has_bos=False)
    tokenizer.bos_token = None
    with pytest.raises(ConfigError, match="names none"):
        prepare_tokenizer(tokenizer, PromptSettings(add_bos=True))
    prepare_tokenizer(tokenizer, PromptSettings(add_bos=False))

    class Fixed:
        bos_token, bos_token_id, chat_template = "<s>", 1, None

        def __call__(self, text, **options):
            return {"input_ids": [7, 8]}

    with pytest.raises(UnsupportedError, match="Fixed cannot be told whether to add <s>"):
        prepare_tokenizer(Fixed(), PromptSettings(add_bos=True))


def test_templates_are_files_or_texts(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    for given in (path, str(path), path.read_text()):
        settings = PromptSettings(chat_template=given)
        tokenizer = prepare_tokenizer(text_models.make_tokenizer(), settings)
        assert tokenizer.decode(chat_tokens(tokenizer, HELLO)) == "[Hello]"
    parts = "{% for m in messages %}{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endfor %}"
    prepare_tokenizer(text_models.make_tokenizer(), PromptSettings(chat_template=parts))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}", "TemplateSyntaxError"),
        ("{{ nobody.knows.this }}", "UndefinedError"),
        ("{{ 'Hello' }}", "leaves the messages out"),
        ("missing.jinja", "a file, or the template itself.*'missing.jinja'.*No such file"),
        ("x" * 5000, "a file, or the template itself"),
    ],
)
def test_a_bad_template_is_refused_at_once(template, message):
    with pytest.raises(ConfigError, match=message):
        prepare_tokenizer(text_models.make_tokenizer(), PromptSettings(chat_template=template))


def test_records_and_commands_name_what_was_set():
    assert PromptSettings().about == {} and PromptSettings().command == []
    one = PromptSettings(add_bos=False, chat_template="{{ messages }}")
    assert one.command == ["--no-add-bos", "--chat-template", "{{ messages }}"]
    other = PromptSettings(add_bos=False, chat_template="{{ messages[0] }}")
    assert one.about["add_bos"] is False
    assert one.about["chat_template"] != other.about["chat_template"]
