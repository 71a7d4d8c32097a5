"""Calibration of a model that is a list of layers: passes, statistics, refusals, resuming."""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from octavo import CheckpointError, ConfigError, UnsupportedError
from octavo.calibration.data import PromptData
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import (
    Calibration,
    Subject,
    calibrate,
    calibrate_to_file,
    load_state,
    save_state,
)
from octavo.calibration.scale_file import ScaleHeader, load_scales
from octavo.calibration.state import StateFile, state_path
from octavo.numerics.hadamard import hadamard

LAYERS = ["blocks.0", "blocks.1"]
HEADS = 2


class Model:
    """Each layer is given its prompt times a factor, as q, and half and twice of it, as k and v."""

    def __init__(self, factors=(1.0, 3.0)):
        self.factors = factors
        self.see = None
        self.fails_at = None
        self.num_calls = 0

    @contextmanager
    def observe(self, see):
        self.see = see
        yield
        self.see = None

    def forward(self, batch):
        self.num_calls += 1
        x = torch.cat(list(batch))
        for index, (name, factor) in enumerate(zip(LAYERS, self.factors, strict=True)):
            if self.num_calls == self.fails_at and index == 1:
                raise KeyboardInterrupt
            self.see(name, x * factor, x * factor / 2, x * factor * 2)


def prompts(num_prompts=6):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, HEADS, 8, generator=generator) for _ in range(num_prompts)]


def run(settings=None, model=None, given=None, state_file=None, calibration=None):
    model = model or Model()
    calibration = calibration or Calibration(LAYERS, settings or CalibrationSettings())
    batches = [[prompt] for prompt in (prompts() if given is None else given)]
    return calibrate(
        calibration,
        lambda start: batches,
        observe=model.observe,
        forward=model.forward,
        state_file=state_file,
    )


def key_file(tmp_path, **key):
    given = {"model": "m", "data": "d", "margin": "1.5", **key}
    return StateFile(path=tmp_path / "s.json.partial", key=given, save_every=2)


def test_scales_are_margin_times_amax_over_448():
    result = run(CalibrationSettings(margin=2.0)).result(ScaleHeader(model="m", data="d"))
    amax = float(torch.cat(prompts()).abs().max())
    assert list(result.scales.layers) == LAYERS
    layer = result.scales.layer("blocks.1")
    assert layer.q == pytest.approx(2 * 3 * amax / 448)
    assert layer.k == pytest.approx(layer.q / 2)
    assert layer.v == pytest.approx(layer.q * 2)
    header = result.scales.header
    assert (header.model, header.data, header.observer) == ("m", "d", "amax")
    assert (header.passes, header.margin, result.num_prompts) == (6, 2.0, 6)
    row = result.statistics[3]
    assert (row.layer, row.tensor, row.num_passes, row.num_nonfinite) == ("blocks.1", "q", 6, 0)
    assert row.amax == pytest.approx(3 * amax)
    assert row.headroom == pytest.approx(2.0)
    assert 25 < row.sqnr_db < 40


def test_per_head():
    result = run(CalibrationSettings(granularity="head", margin=1.0)).result()
    amax = torch.cat(prompts()).abs().amax(dim=(0, 2))
    assert result.scales.layer("blocks.0").q == pytest.approx(tuple((amax / 448).tolist()))


def test_percentile_leaves_less_headroom_and_says_so():
    settings = CalibrationSettings(observer="percentile", percentile=90, margin=1.0)
    result = run(settings).result()
    assert result.scales.header.observer == "percentile 90"
    assert all(row.headroom < 1 for row in result.statistics)


def test_a_layer_of_zeros_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"layer blocks\.1: q: .* got only zeros: no scales"):
        run(model=Model(factors=(1.0, 0.0))).result()


def test_a_head_of_zeros_is_refused_by_number():
    given = prompts()
    for prompt in given:
        prompt[:, 1] = 0
    with pytest.raises(ConfigError, match=r"layer blocks\.0: q: .* zeros in heads '1'"):
        run(CalibrationSettings(granularity="head"), given=given).result()


def test_a_percentile_of_zero_is_refused():
    given = [torch.zeros(4, HEADS, 8) for _ in range(3)]
    given[0][0, 0, 0] = 1.0
    with pytest.raises(ConfigError, match=r"percentile 50 of layer blocks\.0: q"):
        run(CalibrationSettings(observer="percentile", percentile=50), given=given).result()


def test_what_is_not_finite_is_counted():
    given = prompts()
    given[2][0, 0, :2] = torch.tensor([math.nan, math.inf])
    result = run(given=given).result()
    assert [row.num_nonfinite for row in result.statistics] == [2] * 6
    assert all(math.isfinite(row.amax) and math.isfinite(row.sqnr_db) for row in result.statistics)


def test_nothing_but_nan_is_refused():
    with pytest.raises(ConfigError, match="only zeros and 64 that were not finite"):
        run(given=[torch.full((4, HEADS, 8), math.nan)]).result()


def test_no_prompts():
    with pytest.raises(ConfigError, match="expected prompts to calibrate on, got none"):
        run(given=[])


def test_a_layer_that_never_ran():
    calibration = Calibration([*LAYERS, "blocks.2"], CalibrationSettings())
    with pytest.raises(ConfigError, match=r"got no pass of 'blocks\.2'"):
        run(calibration=calibration).result()


def test_a_layer_that_is_not_the_models():
    with pytest.raises(ConfigError, match=r"expected one of 'blocks\.0', got blocks\.1"):
        run(calibration=Calibration(LAYERS[:1], CalibrationSettings()))


@pytest.mark.parametrize("observer", ["amax", "percentile", "mse"])
def test_resuming_gives_the_scales_of_an_uninterrupted_run(tmp_path, observer):
    settings = CalibrationSettings(observer=observer, granularity="head")
    expected = run(settings).result()
    model = Model()
    model.fails_at = 6  # in the middle of the sixth prompt; four are saved, one is lost
    state_file = key_file(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(settings, model=model, state_file=state_file)
    resumed = Calibration(LAYERS, settings)
    assert load_state(resumed, state_file)
    assert resumed.num_prompts == 4
    run(given=prompts()[4:], calibration=resumed, state_file=state_file)
    found = resumed.result()
    assert found.scales.layers == expected.scales.layers
    assert found.statistics == expected.statistics


def test_a_run_that_did_not_get_far_has_no_state(tmp_path):
    assert not load_state(Calibration(LAYERS, CalibrationSettings()), key_file(tmp_path))


def test_the_state_of_another_run_says_what_differs(tmp_path):
    save_state(run(), key_file(tmp_path, model="other", margin="2"))
    with pytest.raises(ConfigError, match=r"expected model m, got other; margin 1.5, got 2;"):
        load_state(Calibration(LAYERS, CalibrationSettings()), key_file(tmp_path))


def test_the_state_of_other_layers(tmp_path):
    save_state(run(), key_file(tmp_path))
    with pytest.raises(ConfigError, match="expected the state of 1 layers"):
        load_state(Calibration(LAYERS[:1], CalibrationSettings()), key_file(tmp_path))


@pytest.mark.parametrize("content", [b"", b"no state", b"PK\x03\x04 half of a file"])
def test_a_damaged_state(tmp_path, content):
    state_file = key_file(tmp_path)
    state_file.path.write_bytes(content)
    with pytest.raises(CheckpointError, match="expected the state of a calibration"):
        load_state(Calibration(LAYERS, CalibrationSettings()), state_file)


def test_where_the_state_lies():
    assert str(state_path("out/s.json")) == "out/s.json.partial"
    with pytest.raises(ConfigError, match="save_every from 1 on, got 0"):
        StateFile(path=state_path("s.json"), key={}, save_every=0)


BOTH = CalibrationSettings(granularity="head", margin=1.0, rotate_keys=True, center_keys=True)


def run_in_passes(model=None, given=None, state_file=None, calibration=None, settings=BOTH):
    model, given = model or Model(), prompts() if given is None else given
    return calibrate(
        calibration or Calibration(LAYERS, settings),
        lambda start: ([prompt] for prompt in given[start:]),
        observe=model.observe,
        forward=model.forward,
        state_file=state_file,
    )


def test_scales_of_rotated_and_centered_keys():
    model = Model()
    found = run_in_passes(model).result()
    k = torch.cat(prompts()).double() * 3 / 2
    mean, matrix = k.mean(0), hadamard(8).double()
    layer = found.scales.layer("blocks.1")
    torch.testing.assert_close(torch.tensor(layer.k_mean), mean.float(), rtol=1e-6, atol=1e-7)
    amax = ((k - mean) @ matrix).abs().amax(dim=(0, 2))
    assert layer.k == pytest.approx(tuple((amax / 448).tolist()), rel=1e-5)
    assert layer.q == pytest.approx(
        tuple(((2 * k) @ matrix).abs().amax(dim=(0, 2)).div(448).tolist()), rel=1e-5
    )
    assert layer.v == pytest.approx(tuple((4 * k).abs().amax(dim=(0, 2)).div(448).tolist()))
    assert found.scales.header.rotate_keys and model.num_calls == 12
    assert (found.num_prompts, found.scales.header.passes) == (6, 6)


def test_a_mean_is_exact_beside_large_keys():
    # In float32 the sum of these would be off by more than what is left of them.
    given = [torch.full((4, HEADS, 8), 1e7) + p for p in prompts()]
    mean = run_in_passes(given=given).result().scales.layer("blocks.0").k_mean
    expected = torch.cat(given).div(2).double().mean(0)
    torch.testing.assert_close(torch.tensor(mean), expected.float(), rtol=0, atol=0.5)


def test_nothing_is_centered_or_rotated_by_default():
    result = run().result()
    assert result.scales.layer("blocks.0").k_mean is None and not result.scales.header.rotate_keys


@pytest.mark.parametrize("fails_at", [4, 6, 8, 12])
def test_resuming_in_either_pass(tmp_path, fails_at):
    expected = run_in_passes().result()
    model, state_file = Model(), key_file(tmp_path)
    model.fails_at = fails_at
    with pytest.raises(KeyboardInterrupt):
        run_in_passes(model, state_file=state_file)
    resumed, again = Calibration(LAYERS, BOTH), Model()
    assert load_state(resumed, state_file)
    # Saved every two prompts, and at the end of the first pass.
    num_saved = {4: 2, 6: 4, 8: 6, 12: 10}[fails_at]
    assert resumed.num_seen == num_saved and resumed.is_first_pass == (fails_at <= 6)
    run_in_passes(again, calibration=resumed, state_file=state_file)
    assert again.num_calls == 12 - num_saved
    assert resumed.result().scales.layers == expected.scales.layers


def test_one_pass_is_not_enough_for_means():
    calibration, (prompt, *_) = Calibration(LAYERS, BOTH), prompts()
    for name in LAYERS:
        calibration.see(name, prompt, prompt, prompt)
    with pytest.raises(ConfigError, match="expected two passes over the data to center keys"):
        calibration.result()


def test_means_of_nothing_and_of_nan():
    with pytest.raises(ConfigError, match="got no pass of 'blocks.2'"):
        run_in_passes(calibration=Calibration([*LAYERS, "blocks.2"], BOTH))
    with pytest.raises(ConfigError, match=r"layer blocks\.0: k: expected finite keys"):
        run_in_passes(given=[torch.full((4, HEADS, 8), math.nan)])
    with pytest.raises(ConfigError, match="expected prompts to calibrate on, got none"):
        run_in_passes(given=[])


def test_what_a_subject_cannot_do():
    options = {"name": "m", "dtype": "float32", "layers": LAYERS, "observe": None, "forward": None}
    with pytest.raises(ConfigError, match="expected a KV cache .* got vision_attention"):
        Subject(kind="vision_attention", **options).check(CalibrationSettings(rotate_keys=True))
    subject = Subject(kind="kv_cache", uncentered={"blocks.1": "it has sinks"}, **options)
    subject.check(CalibrationSettings(rotate_keys=True))
    with pytest.raises(UnsupportedError, match=r"blocks\.1: it has sinks"):
        subject.check(CalibrationSettings(center_keys=True))


def subject_of(model, **options):
    given = {"name": "m", "dtype": "float32", "kind": "kv_cache", **options}
    return Subject(layers=LAYERS, observe=model.observe, forward=model.forward, **given)


def test_another_dtype_is_another_run(tmp_path):
    model, path, settings = Model(), tmp_path / "s.json", CalibrationSettings()
    model.fails_at = 4
    data = PromptData("d", "f", None, lambda start: iter(prompts()[start:]))
    with pytest.raises(KeyboardInterrupt):
        calibrate_to_file(subject_of(model), data, path, settings, num_prompts=5, save_every=1)
    other = subject_of(model, dtype="bfloat16")
    with pytest.raises(ConfigError, match="expected dtype bfloat16, got float32; start afresh"):
        calibrate_to_file(other, data, path, settings, num_prompts=5)
    assert (
        calibrate_to_file(subject_of(model), data, path, settings, num_prompts=5).num_prompts == 5
    )


def test_means_of_more_prompts_are_another_run(tmp_path):
    model = Model()
    model.fails_at = 8
    data = PromptData("d", "f", None, lambda start: iter(prompts()[start:]))
    subject = subject_of(model)
    path = tmp_path / "s.json"
    with pytest.raises(KeyboardInterrupt):
        calibrate_to_file(subject, data, path, BOTH, num_prompts=5, save_every=1)
    with pytest.raises(ConfigError, match="expected num_prompts 6, got 5; start afresh"):
        calibrate_to_file(subject, data, path, BOTH, num_prompts=6)
    with pytest.raises(ConfigError, match="means not given, got of keys"):
        calibrate_to_file(subject, data, path, replace(BOTH, center_keys=False), num_prompts=5)
    seen = []
    result = calibrate_to_file(subject, data, path, BOTH, num_prompts=5, on_prompts=seen.append)
    assert seen == [7, 8, 9, 10] and result.num_prompts == 5
    assert load_scales(path) == result.scales and not state_path(path).exists()
