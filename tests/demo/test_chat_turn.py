"""A turn of a chat in the engine: greedy answers, and where they part."""

from types import SimpleNamespace

import pytest

from octavo.demo import stages as task
from octavo.demo.stages import chat_table, chat_turn
from octavo.measure.evaluate.language import local_rows
from octavo.measure.evaluate.requests import LanguageRequest
from octavo.measure.run import Records

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


class Tokenizer:
    """Letters are tokens."""

    chat_template, eos_token_id, bos_token_id = "x", 0, None

    def apply_chat_template(self, messages, **options):
        return f"<{messages[0]['content']}>"

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) % 50 for letter in text]}

    def decode(self, tokens, **options):
        return " " + "".join(chr(65 + token) for token in tokens)


@pytest.fixture
def text_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    from octavo.integrations.transformers.text_model import TextModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(
        **sizes, num_attention_heads=2, vocab_size=50, eos_token_id=None, head_dim=16
    )
    return TextModel("tiny", LlamaForCausalLM(config).eval(), Tokenizer())


def test_each_recipe_answers_and_the_model_is_left_as_it_came(text_model):
    request = LanguageRequest(recipe=("baseline", "token"))
    rows = [row for _, row in local_rows(request, text_model, {})]
    kept = []
    before = text_model.model.config._attn_implementation
    options = {"command": "c", "records": Records(on_record=kept.append)}
    records = chat_turn(text_model, "Why?", rows, max_tokens=6, **options)
    assert kept == records and [r.case["recipe"] for r in records] == ["float32", "fp8 token"]
    first, fp8 = records
    assert first.baseline is None and fp8.baseline == "float32"
    assert first.op == "texts" and first.impl == "engine" and first.case["prompt"] == "Why?"
    assert first.values == {"num_tokens": len(first.case["text"])}  # without the blank before it
    prompt = torch.tensor([text_model.tokenizer("<Why?>")["input_ids"]])
    expected = text_model.model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=0)
    told = text_model.tokenizer.decode(expected[0, prompt.shape[1] :].tolist()).strip()
    assert first.case["text"] == told
    assert text_model.model.config._attn_implementation == before


def test_the_same_tokens_are_counted_from_the_start(text_model, monkeypatch):
    answers = iter([(1, 2, 3, 4), (1, 2, 9, 4, 5), (), (1, 2, 3, 4)])

    class Engine:
        def __init__(self, model, **options):
            assert options["settings"].num_pages == 2

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def generate(self, prompts, sampling):
            assert sampling.temperature == 0 and sampling.max_tokens == 5
            return [SimpleNamespace(tokens=next(answers))]

    monkeypatch.setattr(task, "LLM", Engine)
    request = LanguageRequest(recipe=("baseline", "unit", "token", "unit+promote=2"))
    rows = [row for _, row in local_rows(request, text_model, {})]
    records = chat_turn(text_model, "Why?", rows, max_tokens=5, command="c")
    assert [r.values.get("num_same_tokens") for r in records] == [None, 2, 0, 4]
    assert records[2].case["text"] == "(nothing)"
    table = chat_table(records)
    assert "tiny: Why?" in table.caption
    assert table.rows[1] == ("fp8 unit", "BCJEF", 5, 2) and table.rows[0][-1] is None
