"""Transformers by CUDA graphs: what is refused anywhere, and what is the same on a GPU."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo import calibrate_pipeline, drop_step_cache_, restore_, use_step_cache_
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.apply import apply_
from octavo.integrations.diffusers import full_size
from octavo.integrations.diffusers.step_graphs import (
    GRAPHS,
    StepGraphs,
    _key_of,
    drop_step_graphs_,
    put_graphs_,
    use_step_graphs_,
)
from octavo.numerics.error import relative_rms
from octavo.recipe import Recipe
from octavo_testkit.models.tiny_flux import make_pipeline

CPU = torch.device("cpu")
MAX_JOINT_ERROR = 0.005
SIZES = ["tiny-flux", "tiny-qwen", "tiny-wan"]


def make(name, device=CPU):
    size = full_size.find_full_size(name)
    return full_size.make_transformer(size, device), full_size.make_inputs(size, device)


def test_a_cpu_is_refused_and_nothing_changes():
    model, _ = make("tiny-flux")
    with pytest.raises(UnsupportedError, match="need a CUDA GPU, got cpu"):
        use_step_graphs_(model)
    assert GRAPHS not in vars(model) and "forward" not in vars(model)
    with pytest.raises(ConfigError, match="expected transformers with graphs, got none"):
        drop_step_graphs_(model)


def test_other_models_are_refused():
    with pytest.raises(UnsupportedError, match="expected a transformer of diffusers, got Linear"):
        use_step_graphs_(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="expected a torch module or a pipeline .* got object"):
        use_step_graphs_(object())


def test_a_replaced_forward_is_refused():
    model, _ = make("tiny-flux")
    model.forward = model.forward
    with pytest.raises(UnsupportedError, match="expected a forward of its class"):
        use_step_graphs_(model)


def plant_graphs(model):
    """Graphs as `use_step_graphs_` puts them, which a CPU cannot capture."""
    put_graphs_(model, StepGraphs(model))


def test_what_graphs_would_not_see_is_refused():
    pipe = make_pipeline()
    plant_graphs(pipe.transformer)
    with pytest.raises(UnsupportedError, match="transformer: .* replay .* drop_step_graphs_ first"):
        apply_(pipe, Recipe(linear="fp8"))
    with pytest.raises(UnsupportedError, match="without graphs, which replay each step whole"):
        use_step_cache_(pipe, "tea_cache", {"coefficients": [1.0]})
    with pytest.raises(ConfigError, match="got one that replays graphs"):
        calibrate_pipeline(pipe, ["a"], num_inference_steps=1)
    assert restore_(pipe).layers == {"transformer.step_graphs": [""]}
    assert GRAPHS not in vars(pipe.transformer) and "forward" not in vars(pipe.transformer)


def test_a_step_cache_that_is_gone_is_no_hook():
    pipe = make_pipeline()
    use_step_cache_(pipe, "tea_cache", {"coefficients": [1.0]})
    with pytest.raises(UnsupportedError, match="got a replaced or hooked one"):
        use_step_graphs_(pipe)
    drop_step_cache_(pipe)
    with pytest.raises(UnsupportedError, match="need a CUDA GPU, got cpu"):
        use_step_graphs_(pipe)


@pytest.mark.parametrize("leaf", [torch.zeros(2), object(), 1j], ids=["cpu", "object", "complex"])
def test_arguments_that_a_graph_cannot_hold(leaf):
    with pytest.raises(UnsupportedError, match="expected"):
        _key_of(leaf)


def test_values_of_different_kinds_have_different_keys():
    assert len({_key_of(leaf) for leaf in (True, 1, 1.0, "1", None)}) == 5


def test_graphs_are_no_part_of_a_copy():
    model, _ = make("tiny-flux")
    with pytest.raises(UnsupportedError, match="drop_step_graphs_ first"):
        copy.deepcopy(StepGraphs(model))
    with pytest.raises(ConfigError, match="max_graphs of 1 or more, got 0"):
        StepGraphs(model, 0)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("recipe", [None, Recipe(linear="fp8", attention="fp8")], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_replays_are_the_eager_step(name, recipe):
    model, inputs = make(name, torch.device("cuda"))
    if recipe is not None:
        apply_(model, recipe)
    others = {
        n: 1.5 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for n, x in inputs.items()
    }
    expected = [model(**given)[0] for given in (inputs, others)]
    assert use_step_graphs_(model) == ["transformer"]
    found = [model(**given)[0] for given in (inputs, others, inputs)]
    for actual, eager in zip(found, [*expected, expected[0]], strict=True):
        # The sums of joint products may have another order.
        assert relative_rms(actual, eager) <= (0 if recipe is None else MAX_JOINT_ERROR)
    assert len(vars(model)[GRAPHS].captured) == 1
    with torch.enable_grad(), pytest.raises(UnsupportedError, match="without gradients"):
        model(**inputs)
    drop_step_graphs_(model)
    assert torch.equal(model(**inputs)[0], expected[0])


@pytest.mark.gpu
@torch.no_grad()
def test_the_oldest_graph_is_given_up():
    model, inputs = make("tiny-wan", torch.device("cuda"))
    use_step_graphs_(model, max_graphs=2)
    for num_frames in (1, 2, 3, 1):
        shape = (1, 16, num_frames, 8, 8)
        given = inputs | {"hidden_states": torch.randn(shape, device="cuda").bfloat16()}
        assert model(**given)[0].shape == shape
        assert len(vars(model)[GRAPHS].captured) <= 2
