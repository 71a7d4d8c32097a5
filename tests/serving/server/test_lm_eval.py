"""lm-eval's local task through our server, as docs/how-to/evaluate-language-models.md says."""

import json

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("lm_eval")
pytest.importorskip("aiohttp")


from octavo_testkit.serving.fake_engine import FakeEngine
from octavo_testkit.serving.fake_server import listening

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TASK = """
task: octavo_sums
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: generate_until
doc_to_text: "What is {{{{question}}}}? say:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 16
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


class Adder(FakeEngine):
    """Adds, but not 3 + 3."""

    def _text(self, request, prompt):
        a, b = prompt.rpartition("What is ")[2].partition("?")[0].split(" + ")
        return f"{7 if a == b == '3' else int(a) + int(b)}\nand more"


@pytest.fixture
def folder(tmp_path):
    rows = [{"question": f"{a} + 3", "answer": str(a + 3)} for a in range(4)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(TASK.format(data=data))
    return tmp_path


@pytest.mark.parametrize(
    ("model", "path", "options", "chat"),
    [
        ("local-chat-completions", "chat/completions", {}, True),
        ("local-completions", "completions", {"tokenizer_backend": None}, False),
    ],
)
def test_a_local_task(folder, monkeypatch, model, path, options, chat):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with listening(Adder()) as (url, engine, _):
        arguments = {"model": "fake", "base_url": f"{url}/v1/{path}", "num_concurrent": 1}
        found = simple_evaluate(
            model=model,
            model_args={**arguments, "max_retries": 1, **options},
            tasks=["octavo_sums"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            apply_chat_template=chat,
            bootstrap_iters=0,
        )
        assert len(engine.added) == 4
        assert engine.added[0].sampling.stop and engine.added[0].sampling.temperature == 0
    assert found["results"]["octavo_sums"]["exact_match,none"] == 0.75
