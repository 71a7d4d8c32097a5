"""octavo eval tasks: lm-eval's tasks from local files over rows of a tiny model, no network."""

import json

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

import torch

from octavo.cli.main import COMMANDS, make_app, run
from octavo.integrations.transformers.text_model import load_text_model
from octavo.measure import store
from octavo.measure.evaluate.answering import answer_text
from octavo.measure.evaluate.harness_model import score_tokens
from octavo_testkit.models.text_models import make_decoder, save_decoder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

COMMON = """
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
"""
CHOICE = (
    COMMON
    + """
task: octavo_choice
output_type: multiple_choice
doc_to_text: "{{{{question}}}} is"
doc_to_choice: [" one", " two or three", " seven"]
doc_to_target: "{{{{label}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
)
ANSWER = (
    COMMON
    + """
task: octavo_answer
output_type: generate_until
doc_to_text: "Say {{{{question}}}}:"
doc_to_target: "{{{{greedy}}}}"
generation_kwargs: {{until: ["{stop}"], max_gen_toks: 6, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
)
ROLLING = (
    COMMON
    + """
task: octavo_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}]
"""
)
NUM_QUESTIONS = 12


def octavo(*args):
    return run(make_app(COMMANDS), ["eval", "tasks", *map(str, args)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and tasks that it answers rightly now and then: every third greedy one is."""
    folder = tmp_path_factory.mktemp("tiny")
    model = make_decoder("llama", vocab_size=258, num_hidden_layers=2)
    save_decoder(folder, model, num_tokens=258)
    text_model = load_text_model(str(folder))
    rows = []
    for number in range(NUM_QUESTIONS):
        question = f"number {number}"
        greedy = answer_text(text_model, f"Say {question}:", max_tokens=6)
        rows.append(
            {
                "question": question,
                "label": number % 3,
                "greedy": greedy if number % 3 == 0 else f"not {greedy}",
                "text": f"The {question} is a word of this text. " * (40 if number == 0 else 1),
            }
        )
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, text in (("choice", CHOICE), ("answer", ANSWER), ("rolling", ROLLING)):
        (tasks / f"{name}.yaml").write_text(text.format(data=data, stop="no such text"))
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch, folder):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def ask(folder, path, tasks, *more):
    args = ("--include-path", folder / "tasks", "--tasks", tasks, "-o", path)
    rows = ("--recipe", "baseline", "--recipe", "unit")
    return octavo(folder, *args, *rows, *more)


def test_likelihoods_are_those_of_the_plain_model(folder):
    model = make_decoder("llama", vocab_size=258, num_hidden_layers=2)
    tokens = torch.randint(2, 258, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        logs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for split in (1, 4, 9, 22):
        total = sum(float(logs[i - 1, tokens[i]]) for i in range(split, 23))
        for chunk in (5, 8, 2048):
            found, _ = score_tokens(model, (tokens[:split], tokens[split:]), chunk)
            assert found == pytest.approx(total, rel=1e-4)
    best = int(logs[-1].argmax())
    assert score_tokens(model, (tokens, [best]), 2048)[1]
    assert not score_tokens(model, (tokens, [(best + 1) % 258]), 2048)[1]


def test_lm_evals_own_model_has_the_same_results(folder, tmp_path):
    """Its class for transformers, with the same weights."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.bos_token  # which HFLM needs
    theirs = {}
    # With BOS, its class scores BOS itself as a word of a whole text.
    for task, add_bos in (("octavo_choice", True), ("octavo_rolling", False)):
        found = simple_evaluate(
            model=HFLM(
                pretrained=model,
                tokenizer=tokenizer,
                batch_size=1,
                device="cpu",
                add_bos_token=add_bos,
            ),
            tasks=[task],
            task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
            num_fewshot=2,
            bootstrap_iters=10,
        )
        theirs |= found["results"]
    path = tmp_path / "records.jsonl"
    assert ask(folder, path, "octavo_choice,octavo_rolling", "--num-fewshot", 2) == 0
    choice, rolling = store.read(path)[:2]
    for name in ("acc,none", "acc_norm,none", "acc_stderr,none"):
        assert choice.values[name] == pytest.approx(theirs["octavo_choice"][name])
    assert choice.values["score_standard_error_percent"] == pytest.approx(
        100 * choice.values["acc_stderr,none"]
    )
    perplexity = theirs["octavo_rolling"]["word_perplexity,none"]
    assert rolling.values["word_perplexity,none"] == pytest.approx(perplexity, rel=1e-3)
    assert rolling.values["lower_is_better"] == rolling.values["word_perplexity,none"]


def test_tasks_of_each_kind_with_their_mean(folder, tmp_path, capsys):
    path = tmp_path / "records.jsonl"
    assert ask(folder, path, "octavo_choice,octavo_answer,octavo_rolling") == 0
    told = " ".join(capsys.readouterr().out.split())
    records = store.read(path)
    buckets = ["octavo_choice", "octavo_answer", "octavo_rolling", "all"]
    assert [r.case["bucket"] for r in records] == buckets * 2
    assert [r.case["recipe"] for r in records] == ["float32"] * 4 + ["fp8 unit"] * 4
    choice, answer, rolling, mean = records[:4]
    assert answer.values["score_percent"] == pytest.approx(100 / 3)  # as planted
    assert (choice.case["metric"], answer.case["metric"]) == ("acc,none", "exact_match,none")
    assert "score_percent" not in rolling.values
    both = choice.values["score_percent"] + answer.values["score_percent"]
    assert mean.values["score_percent"] == pytest.approx(both / 2)
    assert mean.values["num_questions"] == 2 * NUM_QUESTIONS
    assert {r.values["num_fp8_kv_cache_layers"] for r in records[:4]} == {0}
    assert {r.values["num_fp8_kv_cache_layers"] for r in records[4:]} == {2}
    for own, first in zip(records[4:], records[:4], strict=True):
        assert own.baseline == "float32" and own.case.get("questions_sha256") == first.case.get(
            "questions_sha256"
        )
    # FP8 changes what is read, and what is retained follows.
    own = records[6]
    assert own.values["word_perplexity,none"] != rolling.values["word_perplexity,none"]
    retained = rolling.values["word_perplexity,none"] / own.values["word_perplexity,none"]
    assert own.values["recovery_percent"] == pytest.approx(100 * retained)
    assert {"is_shifted", "shift_p_value", "recovery_percent"} <= records[7].values.keys()
    assert "octavo_answer" in told and "recovery (%)" in told and "Use FP8" in told


def test_a_single_task_of_a_file_with_calibrated_scales_and_a_chat_template(folder, tmp_path):
    path = tmp_path / "records.jsonl"
    yaml = folder / "tasks" / "choice.yaml"
    more = ("--recipe", "head", "--apply-chat-template", "-n", 5)
    assert octavo(folder, "--tasks", yaml, "--recipe", "baseline", *more, "-o", path) == 0
    first, own = store.read(path)
    assert first.values["num_questions"] == 5 and first.case["bucket"] == "all"
    assert first.case["is_chat"] is True and first.case["limit"] == 5
    assert "difference_percent" in own.values and "recipe_digest" in own.case
    # The command repeats the measurement.
    again = tmp_path / "again.jsonl"
    assert run(make_app(COMMANDS), [*first.command.split()[1:], "-o", str(again)]) == 0
    assert [r.values for r in store.read(again)] == [first.values, own.values]
    assert octavo(folder, "--tasks", yaml, "--recipe", "head", "-n", 5, "-o", path) == 0
    assert store.read(path)[-1].case["questions_sha256"] != first.case["questions_sha256"]


def test_an_answer_ends_at_a_stop_text(folder, tmp_path):
    """At the second letter of what the model says: the answer is its first."""
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["question"] == "number 0"]
    stop = row["greedy"][1]
    assert stop != row["greedy"][0]
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({**row, "greedy": row["greedy"][0]}))
    text = ANSWER.format(data=data, stop=json.dumps(stop)[1:-1])
    (tmp_path / "answer.yaml").write_text(text.replace("octavo_answer", "octavo_stop"))
    path = tmp_path / "records.jsonl"
    args = ("--tasks", tmp_path / "answer.yaml", "--recipe", "baseline", "-o", path)
    assert octavo(folder, *args) == 0
    assert store.read(path)[0].values["score_percent"] == 100


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "expected tasks of lm-eval, got none: --tasks arc_easy,gsm8k"),
        (("--tasks", "octavo_choice,octavo_choice"), "expected different tasks"),
        (("--tasks", "no_such_task"), "or a YAML file, got 'no_such_task'"),
        (
            ("--tasks", "octavo_choice", "--recipe", "baseline+prefill=triton"),
            "got 'baseline+prefill=triton'",
        ),
        (("--tasks", "octavo_choice", "--chat-template", "x"), "is for --apply-chat-template"),
        (("--tasks", "octavo_choice", "--num-fewshot", 11, "--num-questions", 0), "of 1 or more"),
    ],
)
def test_what_cannot_be_is_said(folder, capsys, args, message):
    assert octavo(folder, "--include-path", folder / "tasks", *args) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_sample: false": "do_sample: true, num_beams: 4"}, "got num_beams"),
        ({"Say": "Say " + "many words " * 200}, "expected prompts of up to 1024 tokens"),
        ({"{test: ": "{test: no/such/"}, "lm-eval cannot load"),
        ({"task: ": "unsafe_code: true\ntask: "}, "octavo eval code has one"),
    ],
)
def test_tasks_that_cannot_run_are_refused(folder, tmp_path, capsys, changes, message):
    text = (folder / "tasks" / "answer.yaml").read_text()
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "answer.yaml").write_text(text)
    assert octavo(folder, "--tasks", tmp_path / "answer.yaml", "--recipe", "baseline") == 1
    assert message in " ".join(capsys.readouterr().err.split())
