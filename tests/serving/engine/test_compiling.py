"""When an engine compiles its model's layers, what it says, and what it does if that fails."""

import pytest
import torch

pytest.importorskip("transformers")
from octavo.serving.engine import compiling
from octavo.serving.engine.engine import Engine, load_engine
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.serving.tiny_engine import SETTINGS, make_engine, make_model, make_request, run


@pytest.fixture
def trials(monkeypatch):
    """The passes that are tried, in place of a compiler; on what passes for a GPU."""
    found = []
    monkeypatch.setattr(compiling, "pays_off", lambda device: True)
    monkeypatch.setattr(
        compiling, "try_pass", lambda *_, num_tokens, num_seqs: found.append(num_tokens)
    )
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self: setattr(self, "_compiled_call_impl", 1)
    )
    return found


def engine_and_lines(**changes):
    lines = []
    settings = EngineSettings(**{**SETTINGS, "max_num_batched_tokens": 300, **changes})
    return load_engine(make_model(), None, settings, tell=lines.append), lines


def num_compiled(engine):
    return sum(part._compiled_call_impl is not None for part in engine._model._parts())


def test_a_gpu_compiles_by_default_and_says_so(trials):
    engine, lines = engine_and_lines()
    assert engine.settings.compile is True and num_compiled(engine) == 3
    assert trials == [1, 64, 256]
    assert "compiling" in lines[0] and "OCTAVO_CACHE_DIR" in lines[0]
    assert lines[1].startswith("compiled the model's layers in ")
    engine.close()
    assert num_compiled(engine) == 0


def test_no_more_tokens_are_tried_than_a_pass_may_have(trials):
    engine_and_lines(max_num_batched_tokens=64)
    assert trials == [1, 64]


@pytest.mark.parametrize("changes", [{"cuda_graphs": False}, {"compile": False}], ids=str)
def test_nothing_is_compiled(changes, trials):
    engine, lines = engine_and_lines(**changes)
    assert engine.settings.compile is False
    assert (num_compiled(engine), trials, lines) == (0, [], [])


def test_a_cpu_compiles_nothing_by_default():
    assert not compiling.pays_off(torch.device("cpu")) and compiling.pays_off(torch.device("cuda"))
    engine, lines = engine_and_lines()
    assert engine.settings.compile is False and lines == []


def fail(*_, **__):
    raise RuntimeError("the compiler found something")


def test_a_model_that_cannot_be_compiled_runs_as_it_is(trials, monkeypatch, caplog):
    monkeypatch.setattr(compiling, "try_pass", fail)
    engine, lines = engine_and_lines()
    assert engine.settings.compile is False and num_compiled(engine) == 0 and len(lines) == 1
    assert "runs without torch.compile, which failed: RuntimeError: the compiler" in caplog.text
    (truth,) = run(make_engine(), make_request(max_tokens=3))
    assert run(engine, make_request(max_tokens=3))[0].tokens == truth.tokens


def test_what_was_asked_for_fails_loudly(trials, monkeypatch):
    monkeypatch.setattr(compiling, "try_pass", fail)
    with pytest.raises(RuntimeError, match="the compiler found something"):
        engine_and_lines(compile=True)


def test_the_engine_tells_its_logger_by_default():
    assert Engine.__init__.__kwdefaults__["tell"].__self__.name == "octavo.serving.engine.engine"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_the_defaults_on_a_gpu():
    """Compiled and captured: the tokens of an engine without either, in float32."""
    model = make_model(head_dim=64, hidden_size=256).to("cuda")
    settings = {"num_pages": 32, "max_num_seqs": 4, "max_num_batched_tokens": 300}
    requests = [make_request(str(i), length=1 + 40 * i, which=i, max_tokens=9) for i in range(5)]
    plain = load_engine(model, None, EngineSettings(**settings, cuda_graphs=False))
    assert plain.settings.compile is False and not plain.has_graphs
    truth = [done.tokens for done in run(plain, *requests)]
    plain.close()
    engine = load_engine(model, None, EngineSettings(**settings, compile=True))
    assert engine.has_graphs and num_compiled(engine) == 3
    assert [done.tokens for done in run(engine, *requests)] == truth
    assert engine._runner.graphs.num_replays >= engine.stats().num_steps
    engine.close()
