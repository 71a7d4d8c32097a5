"""Inputs beyond the range of a static scale are counted, and warned of once."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn

from octavo import CalibrationSettings, Recipe, apply_, calibrate_linear
from octavo.integrations.linear import count_every_call, read_saturation
from octavo.layers import saturation
from octavo.layers.joint_linear import JointLinear
from octavo.layers.linear import Fp8Linear
from octavo.recipe import LinearSettings

STATIC = LinearSettings(activation="tensor", scaling="static")


def layer(scale=1.0, width=20, name="blocks.0.fc", settings=STATIC):
    torch.manual_seed(0)
    made = nn.Linear(width, 32)
    return Fp8Linear.from_linear(made, settings, input_scale=scale, name=name)


def run(model, *inputs):
    with torch.inference_mode():
        for x in inputs:
            model(x)


@pytest.fixture
def told():
    """The warnings of a test, which it allows."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def test_what_is_beyond_the_range_is_counted(told):
    fc = layer(scale=0.5)
    x = torch.zeros(3, 20)
    # 464 · 0.5 still rounds to the largest number; NaN is no size, Inf is beyond all.
    x[0, :6] = torch.tensor([224.0, 232.0, 232.1, -448.0, torch.nan, -torch.inf])
    run(fc, x)
    assert fc.saturation.read() == (3, 60, torch.inf)
    fc = layer(scale=0.5)
    run(fc, x[:, :4].repeat(1, 5))
    assert fc.saturation.read() == (10, 60, 2.0)


def test_padding_of_odd_sizes_is_not_counted(told):
    fc = layer(width=17)
    run(fc, torch.full((2, 3, 17), 900.0))
    assert fc.saturation.read() == (102, 102, pytest.approx(900 / 448))


def test_large_inputs_are_counted_in_parts(monkeypatch, told):
    monkeypatch.setattr(saturation, "CHUNK", 7)
    fc = layer()
    x = torch.zeros(3, 20)
    x.view(-1)[[0, 6, 7, 59]] = 1000.0
    run(fc, x)
    assert fc.saturation.read() == (4, 60, pytest.approx(1000 / 448))


def test_one_warning_for_all_layers_of_a_model(told):
    model = nn.Sequential(layer(name="a", width=32), layer(name="b", width=32), layer(5.0, 32, "c"))
    x = torch.zeros(4, 32)
    x[0, 0] = 4480.0
    run(model, x, x)  # the second pass tells of the first
    assert len(told) == 1
    message = str(told[0].message)
    assert "a (0.781 % of its inputs, up to 10 times the range)" in message
    assert "c (" not in message
    assert "Calibrate again on data like these, or with a larger margin" in message
    run(model, *[x] * 5)
    assert len(told) == 1


def test_no_warning_where_scales_reach():
    model = nn.Sequential(layer(width=32), layer(width=32))
    run(model, *torch.randn(20, 4, 32))
    assert read_saturation(model)["0"].num_saturated == 0
    assert read_saturation(model)["0"].num_values > 0


def test_many_layers_are_not_all_named(told):
    model = nn.Sequential(*(layer(1e-4, 32, f"layer{i}") for i in range(8)))
    run(model, *torch.ones(2, 1, 32))
    assert "and 3 more layers: results may be wrong" in str(told[0].message)


def test_calls_that_count(monkeypatch, told):
    monkeypatch.setattr(saturation, "FIRST", 3)
    fc = layer()
    fc.saturation.reset(every=4)
    large = torch.full((1, 20), 1000.0)
    seen = []
    for _ in range(10):
        before = fc.saturation.num_values
        run(fc, large)
        seen.append(fc.saturation.num_values > before)
    assert seen == [True, True, True, False, True, False, False, False, True, False]


def test_every_call_counts_when_asked(told):
    model = nn.Sequential(layer(width=32))
    run(model, *torch.zeros(100, 1, 32))
    with count_every_call(model):
        run(model, *torch.zeros(100, 1, 32))
        run(model, torch.full((1, 32), 1000.0))
    assert read_saturation(model) == {"0": (32, 101 * 32, pytest.approx(1000 / 448))}
    assert [str(w.message)[:7] for w in told] == ["inputs "]
    run(model, *torch.zeros(40, 1, 32))
    assert read_saturation(model)["0"].num_values < 110 * 32


def test_dynamic_and_weight_only_layers_count_nothing():
    for settings in (LinearSettings(), LinearSettings(activation=None)):
        fc = layer(None, settings=settings)
        run(fc, torch.full((1, 20), 1e6))
        assert fc.saturation is None and read_saturation(nn.Sequential(fc)) == {}


def test_counters_are_in_no_file():
    fc = layer()
    assert set(fc.state_dict()) == {"weight", "weight_scale", "input_scale", "bias"}
    assert not any("satur" in name for name, _ in fc.named_buffers())


def test_copies_count_for_themselves(told):
    fc = layer()
    run(fc, torch.full((1, 20), 1000.0))
    file = io.BytesIO()
    torch.save(fc, file)
    file.seek(0)
    for other in (copy.deepcopy(fc), torch.load(file, weights_only=False)):
        run(other, torch.full((1, 20), 1000.0))
        assert other.saturation.read().num_saturated == 40
    assert fc.saturation.read().num_saturated == 20
    del vars(fc)["saturation"]  # as pickled by an older octavo
    run(fc, torch.full((1, 20), 1000.0))
    assert fc.saturation is None


def test_another_scale_is_counted_afresh(told):
    fc = layer()
    run(fc, torch.full((1, 20), 1000.0))
    fc.set_input_scale_(3.0)
    run(fc, torch.full((1, 20), 1000.0))
    assert fc.saturation.read() == (0, 20, pytest.approx(1000 / 448 / 3))


def test_layers_that_are_one_product_count_once(told):
    weights = LinearSettings(weight="channel", activation="tensor", scaling="static")
    model = nn.ModuleList(layer(1.0, 32, f"{name}_proj", weights) for name in "qkv")
    joint = JointLinear(list(model))
    x = torch.full((1, 32), 1000.0)
    with torch.inference_mode():
        for _ in range(2):
            for part in model:
                part(x)
    found = read_saturation(model)
    assert {counts.num_values for counts in found.values()} == {64}
    assert "in q_proj + k_proj + v_proj (100 % of its inputs" in str(told[0].message)
    joint.split_()
    with torch.inference_mode():
        model[0](x)
    assert [counts.num_values for counts in read_saturation(model).values()] == [32, 0, 0]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_layer_counts_nothing_and_is_one_graph():
    torch._dynamo.reset()
    fc = layer()
    x = torch.full((2, 20), 1000.0)
    compiled = torch.compile(fc, fullgraph=True, backend="eager")
    with torch.inference_mode():
        out = compiled(x)
    assert fc.saturation.num_calls == 0
    with torch.inference_mode():
        torch.testing.assert_close(out, fc(x))
    torch._dynamo.reset()


def test_a_captured_call_counts_nothing(monkeypatch):
    monkeypatch.setattr(saturation, "is_capturing", lambda: True)
    fc = layer()
    run(fc, *torch.full((5, 1, 20), 1000.0))
    assert fc.saturation.num_values == 0


def test_a_gpus_counts_are_told_when_they_have_come(monkeypatch, told):
    arrived = []

    class Late(saturation.HostCopy):
        @property
        def is_ready(self):
            return bool(arrived)

    monkeypatch.setattr(saturation, "HostCopy", Late)
    fc = layer()
    large = torch.full((1, 20), 1000.0)
    run(fc, *[large] * 4)
    assert not told
    arrived.append(True)
    run(fc, large)
    assert len(told) == 1


def test_traced_tensors_leave_nothing_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    fc = layer()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fc.saturation.see(mode.from_tensor(torch.ones(2, 20)), fc.input_scale)
    fc.saturation.see(torch.ones(2, 20, device="meta"), fc.input_scale)
    assert fc.saturation.counts is None


def test_gradients_and_other_modes(told):
    fc = layer()
    run(fc, torch.full((1, 20), 1000.0))  # counted in inference mode first
    fc(torch.full((1, 20), 1000.0).requires_grad_())
    assert fc.saturation.read().num_saturated == 40
    assert not fc.saturation.counts.requires_grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_scales_calibrated_on_smaller_data_are_reported(told):
    torch.manual_seed(0)
    model = Net().eval()
    data = torch.randn(4, 16, 32)
    scales = calibrate_linear(model, list(data), CalibrationSettings(margin=1.0))
    apply_(model, Recipe(linear={"scaling": "static"}, scales=scales.to_dict()))
    run(model, *data)
    assert not told
    run(model, *(5 * data))
    assert len(told) == 1 and "up (" in str(told[0].message) and "down (" in str(told[0].message)
    found = read_saturation(model)
    assert found["up"].num_saturated > 0 and 3 < found["up"].reach <= 5.01
