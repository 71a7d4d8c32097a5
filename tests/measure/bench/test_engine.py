"""Names of rows to recipes; a model that all rows share, and get back as it was; its check."""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.layers.decoder_attention import DecoderAttention
from octavo.layers.linear import Fp8Linear
from octavo.measure.bench import engine as module
from octavo.measure.bench.engine import (
    CONTEXT,
    MAX_ERROR,
    ask,
    check_row,
    check_rows,
    engine_about,
    judge,
    make_rows,
    open_engine,
    open_subject,
    row_about,
)
from octavo.recipe import Recipe
from octavo.serving.engine.settings import EngineSettings


@pytest.fixture(scope="module")
def subject():
    return open_subject(None, "tiny", dtype="auto", device="cpu", layers=None)


def test_what_is_said_of_the_model(subject):
    assert subject.about == {
        "model": "tiny",
        "dtype": "bfloat16",
        # Two layers of 64 · 128 · 2 + 64 · 64 · 2 attention, 3 · 64 · 128 MLP and 2 norms; a norm
        # and the head, but no embedding.
        "weight_bytes": 2 * (2 * (16384 + 8192 + 24576 + 128) + 64 + 64 * 256),
        "weights": "random",
        "layers": 2,
    }
    assert subject.vocab_size == 256 and subject.device.type == "cpu"
    small = open_subject(None, "tiny", dtype="float32", device="cpu", layers=1)
    assert small.about["layers"] == 1 and small.model.dtype == torch.float32


def test_random_weights_get_calibrated_scales(subject):
    names = ["auto", "fp8", "fp8+head", "fp8+token", "fp8+unit", "fp8_e5m2"]
    rows = {row.name: row for row in make_rows(names, subject)}
    assert list(rows) == names
    assert rows["auto"].recipe() is None
    kinds = {
        name: (row.kv_cache.format, row.kv_cache.granularity, row_about(row)["scaling"])
        for name, row in rows.items()
        if row.kv_cache is not None
    }
    assert kinds == {
        "fp8": ("e4m3", "tensor", "static"),
        "fp8+head": ("e4m3", "head", "static"),
        "fp8+token": ("e4m3", "token", "dynamic"),
        "fp8+unit": ("e4m3", "tensor", "unit"),
        "fp8_e5m2": ("e5m2", "tensor", "static"),
    }
    assert rows["fp8"].recipe().scales is not None
    assert rows["fp8+unit"].recipe().scales is None


def test_other_weights_bring_their_scales(subject):
    trained = type(subject)(subject.model, subject.about, is_random=False)
    (row,) = make_rows(["fp8"], trained)
    assert row_about(row)["scaling"] == "checkpoint" and row.recipe().scales is None


def test_layers_to_skip_are_a_rows_own_or_all_rows(subject):
    names = ["auto", "fp8+unit+skip=0", "fp8+unit"]
    rows = make_rows(names, subject, skip_layers=["1"])
    assert [row.recipe().skip_layers for row in rows[1:]] == [("0", "1"), ("1",)]
    assert row_about(rows[1])["skip_layers"] == "0,1"
    with pytest.raises(ConfigError, match="layers to skip are for rows in FP8"):
        make_rows(["auto"], subject, skip_layers=["1"])


def test_prompts_may_have_an_implementation_of_their_own(subject):
    plain, fp8 = make_rows(["auto+prefill=reference", "fp8+unit+skip=0+prefill=mine"], subject)
    assert plain.recipe() is None
    assert plain.prefill_impl == row_about(plain)["prefill_impl"] == "reference"
    assert fp8.recipe().skip_layers == ("0",) and fp8.prefill_impl == "mine"
    assert "prefill_impl" not in row_about(make_rows(["auto"], subject)[0])
    with pytest.raises(ConfigError, match="prefill=IMPL.*got 'prefill='"):
        check_rows(["auto+prefill="])


def test_linear_layers_may_be_fp8(subject):
    names = ["auto", "auto+linear", "fp8+unit+linear", "fp8+linear+head+skip=0"]
    plain, alone, both, head = make_rows(names, subject)
    assert "linear" not in row_about(plain) and plain.linear is None
    assert alone.recipe() == Recipe(linear="fp8") and alone.kv_cache is None
    assert row_about(alone)["linear"] == str(alone.recipe().linear)
    assert both.recipe() == Recipe(
        linear="fp8", kv_cache={"granularity": "tensor", "scaling": "unit"}
    )
    assert head.kv_cache.granularity == "head" and head.recipe().skip_layers == ("0",)
    for name in ("auto+linear+linear", "auto+linear+skip=0", "auto+linear+head"):
        with pytest.raises(ConfigError, match="expected each word once|auto quantizes nothing"):
            check_rows([name])


def test_weights_in_fp8_are_half_as_many_bytes(subject):
    rows = make_rows(["auto", "auto+linear"], subject)
    found = []
    for row in rows:
        with open_engine(subject, row, EngineSettings(num_pages=8)) as engine:
            about = engine_about(engine)
            found.append(about["weight_bytes"])
            # Keys and values of 2 layers, 1 head of 64, in BF16, and a float32 scale for each.
            assert about["cache_bytes"] == 2 * 2 * (2 * 64 * 8 * about["page_size"] + 4)
    assert found[0] == subject.about["weight_bytes"]
    # Two layers of attention and MLP in FP8, and a float32 scale for each output.
    num_weights = 2 * (16384 + 8192 + 24576)
    num_outputs = 2 * (128 + 2 * 64 + 64 + 2 * 128 + 64)
    assert found[1] == found[0] - num_weights + 4 * num_outputs


def test_the_implementation_of_prompts_runs_or_raises(subject):
    settings = EngineSettings(num_pages=8)
    plain, missing = make_rows(["auto+prefill=reference", "auto+prefill=missing"], subject)
    with open_engine(subject, plain, settings) as engine:
        assert {layer.prefill_impl for layer in engine._model.attention} == {"reference"}
        assert {layer.impl for layer in engine._model.attention} == {None}
        assert ask(engine, subject.vocab_size)
    with (
        open_engine(subject, missing, settings) as engine,
        pytest.raises(OctavoError, match="missing"),
    ):
        ask(engine, subject.vocab_size)


def test_a_recipe_s_file_is_a_row(subject, tmp_path):
    path = tmp_path / "r.json"
    Recipe(kv_cache={"granularity": "token"}, skip_layers=["0"]).save(path)
    row, more = make_rows([str(path), f"{path}+skip=1"], subject)
    assert row_about(row)["granularity"] == "token"
    assert more.recipe().skip_layers == ("0", "1")
    Recipe().save(path)
    (plain, _) = make_rows([str(path), "fp8+unit"], subject, skip_layers=["1"])
    assert plain.recipe() == Recipe()
    with pytest.raises(ConfigError, match="skip_layers needs quantized attention or kv_cache"):
        make_rows([f"{path}+skip=1"], subject)


@pytest.mark.parametrize(
    "name",
    ["", "fp4", "auto+skip=0", "auto+head", "fp8+", "fp8+head+token", "fp8+token+unit", "fp8+x"],
)
def test_names_that_are_no_rows(name):
    with pytest.raises(
        ConfigError, match="row .*: (expected|auto quantizes nothing|granularity 'token' and)"
    ):
        check_rows([name])


def test_rows_differ(subject):
    with pytest.raises(ConfigError, match="expected different rows"):
        make_rows(["auto", "auto"], subject)
    with pytest.raises(ConfigError, match="expected different rows"):
        make_rows([], subject)


def test_a_model_or_a_config():
    options = {"dtype": "auto", "device": "cpu", "layers": None}
    for pair in [(None, None), ("model", "tiny")]:
        with pytest.raises(ConfigError, match="expected a model or a config"):
            open_subject(*pair, **options)
    with pytest.raises(ConfigError, match="a number of layers is for random weights"):
        open_subject("model", None, **{**options, "layers": 1})
    with pytest.raises(ConfigError, match="expected auto, bfloat16"):
        open_subject(None, "tiny", **{**options, "dtype": "int8"})


def test_the_model_comes_back(subject):
    before = subject.model.config._attn_implementation
    (row,) = make_rows(["fp8"], subject)
    with (
        pytest.raises(ZeroDivisionError),
        open_engine(subject, row, EngineSettings(num_pages=4)),
    ):
        assert subject.model.config._attn_implementation != before
        raise ZeroDivisionError
    assert subject.model.config._attn_implementation == before


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
    monkeypatch.setattr(module, "_relative_error", lambda *_: 0.3)
    with pytest.raises(UnsupportedError, match=r"within 0\.18 standard"):
        check_row(subject, row, SETTINGS)
    with pytest.raises(UnsupportedError, match=r"within 0\.24 standard"):
        check_row(subject, row, SETTINGS, plain_error=0.03)
    assert check_row(subject, row, SETTINGS, plain_error=0.05) == {"relative_rms": 0.3}
    monkeypatch.setattr(module, "_relative_error", lambda *_: 0.43)
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
    monkeypatch.setattr(module, "_relative_error", lambda *_: float("nan"))
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
    assert 0.01 < errors["linear_rms"] < module.MAX_LINEAR_ERROR


def test_what_linear_layers_round_counts(monkeypatch):
    subject = subject_of("tiny", "auto")
    (row,) = make_rows(["fp8+linear"], subject)
    errors = check_row(subject, row, SETTINGS)
    assert 0.01 < errors["linear_rounding"] < 0.1
    monkeypatch.setattr(module, "_linear_rounding", lambda *_: 0.3)
    monkeypatch.setattr(module, "_relative_error", lambda *_: 0.4611)
    with pytest.raises(UnsupportedError, match=r"within 0\.460\d* standard"):  # √(0.18² + 2 · 0.3²)
        check_row(subject, row, SETTINGS)
    monkeypatch.setattr(module, "_relative_error", lambda *_: 0.459)
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
