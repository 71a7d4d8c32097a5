"""AmaxHistory against a deque, and through everything that happens to a module."""

import copy
import math
import pickle
from collections import deque

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from octavo.errors import ConfigError
from octavo.numerics.amax import HISTORY_LENGTH, AmaxHistory
from octavo.numerics.formats import E5M2
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.scales import amax_to_scale
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

ANY_FLOAT = st.floats(width=32)


class Model:
    """What AmaxHistory promises, in Python."""

    def __init__(self, num_heads: int, length: int) -> None:
        self.rings = [deque(maxlen=length) for _ in range(num_heads)]
        self.num_passes = self.num_nonfinite = 0

    def push(self, values: list[float]) -> None:
        for ring, value in zip(self.rings, values, strict=True):
            ring.append(abs(value) if math.isfinite(value) else 0.0)
        self.num_passes += 1
        self.num_nonfinite += sum(not math.isfinite(value) for value in values)

    def amax(self) -> list[float]:
        return [max(ring, default=0.0) for ring in self.rings]


def state(history: AmaxHistory) -> tuple:
    return tuple(buffer.tolist() for buffer in history.ring)


def filled(shape: tuple[int, ...] = (), passes: int = 5) -> AmaxHistory:
    history = AmaxHistory(shape)
    draw = Draw(3)
    for _ in range(passes):
        history.push(draw.wide(*shape), num_nonfinite=1)
    return history


@hypothesis.given(
    length=st.sampled_from([1, 2, 3, 16]),
    passes=st.lists(st.tuples(ANY_FLOAT, ANY_FLOAT), max_size=40),
)
def test_a_ring_is_a_deque_per_head(length, passes):
    history, model = AmaxHistory((2,), length), Model(2, length)
    for values in passes:
        history.push(torch.tensor(values, dtype=torch.float32))
        model.push(list(values))
        assert history.amax().tolist() == model.amax()
    assert int(history.num_passes) == model.num_passes
    assert int(history.num_nonfinite) == model.num_nonfinite


@hypothesis.given(
    st.lists(
        st.lists(ANY_FLOAT, min_size=6, max_size=6),
        min_size=1,
        max_size=20,
    )
)
def test_observing_tensors_is_pushing_their_finite_amax(tensors):
    per_tensor, per_head = AmaxHistory(), AmaxHistory((2,))
    ring, rings = deque(maxlen=16), [deque(maxlen=16), deque(maxlen=16)]
    num_bad = 0
    for values in tensors:
        x = torch.tensor(values, dtype=torch.float32).reshape(1, 2, 3)
        per_tensor.observe(x)
        per_head.observe(x, PerHead())
        sizes = [abs(v) if math.isfinite(v) else 0.0 for v in values]
        ring.append(max(sizes))
        rings[0].append(max(sizes[:3]))
        rings[1].append(max(sizes[3:]))
        num_bad += sum(not math.isfinite(v) for v in values)
        assert float(per_tensor.amax()) == max(ring)
        assert per_head.amax().tolist() == [max(r) for r in rings]
    assert int(per_tensor.num_nonfinite) == int(per_head.num_nonfinite) == num_bad
    assert int(per_tensor.num_passes) == len(tensors)


def test_the_sixteenth_pass_after_a_large_one_forgets_it():
    assert HISTORY_LENGTH == 16
    history = AmaxHistory()
    history.push(torch.tensor(100.0))
    for i in range(15):
        history.push(torch.tensor(1.0 + i))
        assert history.amax() == 100
    history.push(torch.tensor(2.0))
    assert history.amax() == 15.0


def test_the_current_pass_counts():
    history = AmaxHistory()
    assert history.amax() == 0
    assert history.scale() == 1.0
    history.push(torch.tensor(448.0))
    assert history.scale() == 1.0
    history.push(torch.tensor(896.0))
    assert history.scale() == 2.0


def test_a_bad_value_is_counted_and_forgotten():
    history = AmaxHistory()
    x = torch.ones(4, 8)
    x[0, 0], x[1, 1] = math.nan, -math.inf
    history.observe(x)
    assert history.amax() == 1.0
    assert int(history.num_nonfinite) == 2
    history.push(torch.tensor(math.inf), num_nonfinite=torch.tensor(3))
    assert history.amax() == 1.0
    assert int(history.num_nonfinite) == 6
    assert math.isfinite(float(history.scale()))


def test_an_amax_too_large_for_float32_is_not_finite_either():
    history = AmaxHistory()
    history.push(torch.tensor(1e300, dtype=torch.float64))
    assert history.amax() == 0
    assert int(history.num_nonfinite) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_amax_of_any_dtype_is_kept_as_float32(dtype):
    history = AmaxHistory((2,))
    history.push(torch.tensor([1.5, -2.5], dtype=dtype))
    assert history.amax().dtype == torch.float32
    assert history.amax().tolist() == [1.5, 2.5]


@pytest.mark.parametrize("margin", [1.0, 1.5])
def test_the_scale_is_that_of_the_largest_amax(margin):
    history = filled((3,))
    assert_same_bits(
        history.scale(E5M2, margin=margin), amax_to_scale(history.amax(), E5M2, margin=margin)
    )


def test_reset_forgets_everything():
    history = filled((3,))
    history.reset()
    assert state(history) == state(AmaxHistory((3,)))


def test_the_ring_is_the_module_itself():
    history = filled()
    history.ring.push(torch.tensor(1e9))
    assert history.amax() == 1e9
    assert int(history.num_passes) == 6


def test_buffers_are_saved_and_loaded():
    history, other = filled((3,)), AmaxHistory((3,))
    assert sorted(history.state_dict()) == ["num_nonfinite", "num_passes", "values"]
    assert other.load_state_dict(history.state_dict()) is not None
    assert state(other) == state(history)
    for one in (history, other):  # and both go on alike
        one.push(torch.tensor([9.0, 8.0, 7.0]))
    assert state(other) == state(history)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_equal_and_independent(clone):
    history = filled((3,))
    before = state(history)
    other = clone(history)
    assert state(other) == before
    other.push(torch.tensor([1e6, 1e6, 1e6]))
    assert state(history) == before
    assert state(other) != before


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.float(),
        lambda m: m.bfloat16(),
        lambda m: m.to("cpu", torch.float16),
    ],
    ids=["bfloat16", "half", "double", "float", "bfloat16()", "to-device"],
)
def test_bits_survive_a_change_of_dtype(convert):
    """Inside a model too: its weights change, the history does not."""
    model = nn.ModuleDict({"history": filled((3,)), "linear": nn.Linear(2, 2)})
    values, before = model["history"].values.clone(), state(model["history"])
    convert(model)
    history = model["history"]
    assert_same_bits(history.values, values)
    assert state(history) == before
    assert history.num_passes.dtype == torch.int64
    assert dict(history.named_buffers()).keys() == {"values", "num_passes", "num_nonfinite"}
    history.push(torch.ones(3))
    assert int(history.num_passes) == 6


def test_meta_and_back():
    history = filled((3,)).to("meta")
    assert {buffer.device.type for buffer in history.ring} == {"meta"}
    assert history.values.dtype == torch.float32
    history.push(torch.ones(3, device="meta"))  # nothing asks for values
    assert history.scale().device.type == "meta"
    back = history.to_empty(device="cpu")
    back.reset()
    assert state(back) == state(AmaxHistory((3,)))


def test_a_failed_move_leaves_the_history_as_it_was():
    history = filled()
    before = state(history)

    def fail(tensor):
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        history._apply(fail)
    assert history.values.dtype == torch.float32
    assert state(history) == before


def test_the_position_lives_on_the_device():
    """No Python counter: what a CUDA graph replays must go on counting."""
    history = AmaxHistory()
    assert [value for value in vars(history).values() if type(value) is int] == []
    addresses = [buffer.data_ptr() for buffer in history.ring]
    for _ in range(20):
        history.observe(torch.ones(3))
    assert [buffer.data_ptr() for buffer in history.ring] == addresses


def test_a_gradient_does_not_enter():
    history = AmaxHistory()
    x = torch.ones(3, requires_grad=True)
    history.observe(x)
    history.push((x * 2).amax())
    assert not history.values.requires_grad
    assert not history.scale().requires_grad


@pytest.mark.parametrize(
    ("shape", "amax", "message"),
    [
        ((), torch.ones(1), r"shape \[\], got \[1\]"),
        ((3,), torch.ones(()), r"shape \[3\], got \[\]"),
        ((3,), torch.ones(2), r"shape \[3\], got \[2\]"),
    ],
)
def test_an_amax_of_another_shape(shape, amax, message):
    history = AmaxHistory(shape)
    with pytest.raises(ConfigError, match=message):
        history.push(amax)
    assert int(history.num_passes) == 0


def test_observing_another_granularity():
    with pytest.raises(ConfigError, match=r"shape \[3\], got \[2\]"):
        AmaxHistory((3,)).observe(torch.ones(4, 2, 8), PerHead())
    with pytest.raises(ConfigError, match=r"shape \[3\], got \[\]"):
        AmaxHistory((3,)).observe(torch.ones(4, 3, 8), PerTensor())


@pytest.mark.parametrize("length", [0, -1])
def test_a_history_has_a_length(length):
    with pytest.raises(ConfigError, match=f"at least 1, got {length}"):
        AmaxHistory(length=length)
