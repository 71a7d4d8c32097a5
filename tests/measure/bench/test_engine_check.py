"""What passes the check of an engine, and what does not."""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from octavo.errors import OctavoError, UnsupportedError
from octavo.layers.decoder_attention import DecoderAttention
from octavo.layers.linear import Fp8Linear
from octavo.measure.bench import engine_check
from octavo.measure.bench.engine import make_rows, open_engine, open_subject
from octavo.measure.bench.engine_check import CONTEXT, MAX_ERROR, ask, check_row, judge
from octavo.serving.engine.settings import EngineSettings

SETTINGS = EngineSettings(max_num_seqs=2, num_pages=16, max_context=CONTEXT)


def subject_of(config, dtype):
    return open_subject(None, config, dtype=dtype, device="cpu", layers=None)


def error_of(subject, name):
    (row,) = make_rows([name], subject)
    with open_engine(subject, row, SETTINGS) as engine:
        answers = ask(engine, subject.vocab_size)
    assert len(answers) == 2
    return judge(subject, row, answers)


@pytest.mark.parametrize("config", ["tiny", "tiny-gpt-oss"])
def test_right_ones_are_far_within(config):
    exact, rounded = subject_of(config, "float32"), subject_of(config, "auto")
    assert error_of(exact, "auto") < 1e-5
    assert 0 < error_of(rounded, "auto") < MAX_ERROR["plain"] / 3
    assert error_of(exact, "fp8") < MAX_ERROR["e4m3"] / 3
    assert error_of(rounded, "fp8_e5m2") < MAX_ERROR["e5m2"] / 3


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("config", ["tiny", "tiny-gpt-oss"])
def test_attention_that_is_zero(monkeypatch, config, name, phase):
    monkeypatch.setattr(DecoderAttention, phase, lambda self, q, *a, **k: torch.zeros_like(q))
    with pytest.raises(UnsupportedError, match="is wrong: expected log-probabilities within"):
        error_of(subject_of(config, "auto"), name)


def test_what_the_plain_row_was_off_by_counts(monkeypatch):
    subject = subject_of("tiny", "auto")
    (row,) = make_rows(["fp8"], subject)
    monkeypatch.setattr(engine_check, "_relative_error", lambda *_: 0.3)
    with pytest.raises(UnsupportedError, match=r"within 0\.18 standard"):
        check_row(subject, row, SETTINGS)
    with pytest.raises(UnsupportedError, match=r"within 0\.24 standard"):
        check_row(subject, row, SETTINGS, plain_error=0.03)
    assert check_row(subject, row, SETTINGS, plain_error=0.05) == {"relative_rms": 0.3}
    monkeypatch.setattr(engine_check, "_relative_error", lambda *_: 0.43)
    with pytest.raises(UnsupportedError, match=r"within 0\.42 standard"):
        check_row(subject, row, SETTINGS, plain_error=0.08)


def test_another_token_in_float32(monkeypatch):
    subject = subject_of("tiny", "float32")
    (row,) = make_rows(["auto"], subject)
    with open_engine(subject, row, SETTINGS) as engine:
        answer, *_ = ask(engine, subject.vocab_size)
    first, *others = answer.completion.tokens
    changed = dataclasses.replace(answer.completion, tokens=((first + 1) % 256, *others))
    wrong = dataclasses.replace(answer, completion=changed)
    with pytest.raises(UnsupportedError, match=r"expected the tokens of generate\(\) in float32"):
        judge(subject, row, [wrong])


def test_log_probabilities_that_are_nan(monkeypatch):
    monkeypatch.setattr(engine_check, "_relative_error", lambda *_: float("nan"))
    with pytest.raises(UnsupportedError, match="got nan"):
        error_of(subject_of("tiny", "auto"), "auto")


def test_what_ends_answers_elsewhere_does_not_here():
    subject = subject_of("tiny", "float32")
    subject.model.generation_config.eos_token_id = list(range(256))
    subject.model.generation_config.do_sample = True
    assert error_of(subject, "auto") < 1e-5


@pytest.mark.parametrize("config", ["tiny", "tiny-gpt-oss"])
def test_linear_layers_are_part_of_the_model(config):
    subject = subject_of(config, "float32")
    (row,) = make_rows(["auto+linear"], subject)
    errors = check_row(subject, row, SETTINGS)
    assert errors["relative_rms"] < 1e-5
    assert 0.01 < errors["linear_rms"] < engine_check.MAX_LINEAR_ERROR


def test_what_linear_layers_round_counts(monkeypatch):
    subject = subject_of("tiny", "auto")
    (row,) = make_rows(["fp8+linear"], subject)
    errors = check_row(subject, row, SETTINGS)
    assert 0.01 < errors["linear_rounding"] < 0.1
    monkeypatch.setattr(engine_check, "_linear_rounding", lambda *_: 0.3)
    monkeypatch.setattr(engine_check, "_relative_error", lambda *_: 0.4611)
    with pytest.raises(UnsupportedError, match=r"within 0\.460\d* standard"):  # √(0.18² + 2 · 0.3²)
        check_row(subject, row, SETTINGS)
    monkeypatch.setattr(engine_check, "_relative_error", lambda *_: 0.459)
    assert check_row(subject, row, SETTINGS)["relative_rms"] == 0.459


def test_attention_that_is_zero_beside_linear_layers(monkeypatch):
    monkeypatch.setattr(DecoderAttention, "decode", lambda self, q, *a, **k: torch.zeros_like(q))
    subject = subject_of("tiny", "auto")
    (row,) = make_rows(["fp8+linear"], subject)
    with pytest.raises(UnsupportedError, match="is wrong: expected log-probabilities within"):
        check_row(subject, row, SETTINGS)


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (0.0, "is wrong: expected results of linear layers within"),
        (0.9, "is wrong: expected results of linear layers within"),
        (float("nan"), "the check's prompt failed: expected logits that are finite"),
    ],
)
def test_a_linear_layer_that_is_wrong(monkeypatch, factor, message):
    """The engine computes what its model does: only beside the plain layers it is wrong."""
    subject = subject_of("tiny", "float32")
    (row,) = make_rows(["auto+linear"], subject)
    forward = Fp8Linear.forward

    def wrong(self, x):
        out = forward(self, x)
        return factor * out if self.name.endswith("layers.1.mlp.up_proj") else out

    monkeypatch.setattr(Fp8Linear, "forward", wrong)
    with pytest.raises(OctavoError, match=message):
        check_row(subject, row, SETTINGS)
