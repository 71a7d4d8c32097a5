"""FP8 layers as one product: the results of each by itself, whoever is given what."""

import copy
import io
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from octavo.errors import ConfigError
from octavo.layers.joint_linear import JointPart, join_, join_named_
from octavo.layers.linear import Fp8Linear
from octavo.recipe import LinearSettings
from octavo.testing.asserts import assert_same_bits

GROUP = ("q", "k", "v")
SETTINGS = {
    "default": {},
    "blocks": {"weight": "block 128x128"},
    "weight only": {"activation": None},
    "static": {"scaling": "static"},
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


class Attention(nn.Module):
    """Three projections of one input, as models have them."""

    def __init__(self, *, bias=True, device="cpu", sizes=(256, 128, 128), depth=256, **settings):
        super().__init__()
        torch.manual_seed(0)
        for name, size in zip(GROUP, sizes, strict=True):
            plain = nn.Linear(depth, size, bias=bias, device=device)
            scale = 0.02 if settings.get("scaling") == "static" else None
            layer = Fp8Linear.from_linear(
                plain, LinearSettings(**settings), name=name, input_scale=scale
            )
            setattr(self, name, layer)

    def forward(self, x):
        x = 2 * x
        return self.q(x), self.k(x), self.v(x)


def counted(joint):
    """The inputs of a joint's products, as they come."""
    seen, forward = [], joint.whole.forward

    def noted(x):
        seen.append(x)
        return forward(x)

    joint.whole.forward = noted
    return seen


@pytest.mark.parametrize("shape", [(256,), (1, 256), (63, 256), (2, 5, 256), (0, 256)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_one_product_for_all(settings, bias, shape):
    model, x = Attention(bias=bias, **settings), torch.randn(shape)
    expected = model(x)
    (joint,) = join_named_(model, [GROUP])
    seen = counted(joint)
    for actual, own in zip(model(x), expected, strict=True):
        assert_same_bits(actual.contiguous(), own)
    assert len(seen) == 1 and joint._open is None
    joint.split_()
    assert {type(part) for part in model.children()} == {Fp8Linear}
    for actual, own in zip(model(x), expected, strict=True):
        assert_same_bits(actual, own)
    assert len(seen) == 1


def test_each_is_given_what_it_is_given():
    model = Attention()
    alone = copy.deepcopy(model)
    (joint,) = join_named_(model, [GROUP])
    seen = counted(joint)
    x, y = torch.randn(2, 7, 256)
    assert torch.equal(model.q(x), alone.q(x)) and torch.equal(model.k(y), alone.k(y))
    assert torch.equal(model.v(y), alone.v(y)) and torch.equal(model.v(y), alone.v(y))
    assert len(seen) == 1  # q of x; k and v of y are computed alone
    model.q(x)  # a pass that ends here
    x *= 2
    assert torch.equal(model.q(x), alone.q(x)) and torch.equal(model.k(x), alone.k(x))


def test_who_was_joined_again_is_not_split_by_the_product_before():
    model, x = Attention(), torch.randn(3, 256)
    expected = model(x)
    (joint,) = join_named_(model, [GROUP])
    model.q(x)  # a pass that ends here
    joint.split_()
    assert joint._open is None
    (again,) = join_named_(model, [GROUP])
    joint.split_()
    assert type(model.k) is JointPart and model.k.joint is again
    for actual, own in zip(model(x), expected, strict=True):
        assert torch.equal(actual, own)


def test_threads_do_not_take_the_parts_of_each_other():
    model, inputs = Attention(), list(torch.randn(4, 1, 256))
    expected = [model(x) for x in inputs]
    join_named_(model, [GROUP])

    def run(index):
        with torch.no_grad():
            found = [model(inputs[index]) for _ in range(60)]
        return all(
            torch.equal(a, b) for one in found for a, b in zip(one, expected[index], strict=True)
        )

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(run, range(4)))
    finally:
        sys.setswitchinterval(before)


def test_weights_are_there_once_and_saved_alone():
    model = Attention()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    (joint,) = join_named_(model, [GROUP])
    storages = {part.weight.untyped_storage().data_ptr() for part in model.children()}
    assert storages == {joint.whole.weight.untyped_storage().data_ptr()}
    assert "joint" not in " ".join(name for name, _ in model.named_modules())
    saved = model.state_dict()
    assert saved.keys() == before.keys()
    for name, x in saved.items():
        assert_same_bits(x, before[name])
    file = io.BytesIO()
    torch.save(saved, file)
    num_bytes = sum(x.nbytes for x in saved.values())
    assert num_bytes < len(file.getvalue()) < 1.1 * num_bytes


def test_what_was_there_before_is_freed():
    model = Attention()
    before = [weakref.ref(x) for part in model.children() for x in part.state_dict().values()]
    before += [weakref.ref(x) for part in model.children() for x in part.buffers()]
    join_named_(model, [GROUP])
    assert not any(x() is not None for x in before)


@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias"])
@pytest.mark.parametrize("part", GROUP)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_is_changed_in_place_is_changed_in_the_product(settings, part, name):
    model, alone, x = Attention(**settings), Attention(**settings), torch.randn(3, 256)
    (joint,) = join_named_(model, [GROUP])
    for one in (model, alone):
        tensor = getattr(one.get_submodule(part), name)
        tensor.copy_(tensor.float().flip(0) * 2)
    for actual, own in zip(model(x), alone(x), strict=True):
        assert_same_bits(actual.contiguous(), own)
    joint.split_()
    for actual, own in zip(model(x), alone(x), strict=True):
        assert_same_bits(actual, own)


@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias"])
@pytest.mark.parametrize("part", GROUP)
def test_who_is_given_another_tensor_leaves_the_product(part, name):
    model, alone, x = Attention(), Attention(), torch.randn(3, 256)
    join_named_(model, [GROUP])
    for one in (model, alone):
        layer = one.get_submodule(part)
        other = getattr(layer, name).detach().flip(0)
        setattr(layer, name, nn.Parameter(other, False) if name == "bias" else other)
    assert {type(layer) for layer in model.children()} == {Fp8Linear}
    for actual, own in zip(model(x), alone(x), strict=True):
        assert_same_bits(actual, own)


@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias"])
def test_a_copy_has_a_product_of_its_own(name):
    model, alone, x = Attention(), Attention(), torch.randn(3, 256)
    join_named_(model, [GROUP])
    before = [part.clone() for part in model(x)]
    other = copy.deepcopy(model)
    for one in (other, alone):
        tensor = getattr(one.get_submodule(GROUP[1]), name)
        tensor.copy_(tensor.float().flip(0) * 2)
    for actual, own in zip(other(x), alone(x), strict=True):
        assert_same_bits(actual.contiguous(), own)
    for actual, own in zip(model(x), before, strict=True):
        assert_same_bits(actual.contiguous(), own)


def test_static_layers_share_one_scale_or_are_not_joined():
    model, x = Attention(scaling="static"), torch.randn(3, 256)
    (joint,) = join_named_(model, [GROUP])
    assert joint.whole.input_scale is model.k.input_scale
    before = [part.clone() for part in model(x)]
    model.k.set_input_scale_(0.03)
    assert {type(layer) for layer in model.children()} == {Fp8Linear}
    assert_same_bits(model(x)[0], before[0])
    assert not torch.equal(model(x)[1], before[1])
    assert join_named_(model, [GROUP]) == []
    with pytest.raises(ConfigError, match="one scale for the input, got several"):
        join_([model.q, model.k])


@pytest.mark.parametrize("how", ["taken", "quantized"])
def test_who_is_changed_leaves_the_product(how):
    model, other, x = Attention(), Attention(), torch.randn(3, 256)
    other.q.weight_scale *= 2
    join_named_(model, [GROUP])
    if how == "taken":
        model.q.take_({"weight_scale": other.q.weight_scale})
    else:
        for one in (model.q, other.q):
            one.quantize_weight_(torch.eye(256))
    assert {type(part) for part in model.children()} == {Fp8Linear}
    assert torch.equal(model.q(x), other.q(x)) and torch.equal(model.v(x), other.v(x))


def assert_one_product(model):
    """All parts are of one product, and nothing is there twice."""
    whole = model.q.joint.whole
    for part in model.children():
        assert type(part) is JointPart and part.joint.whole is whole
        for name in ("weight", "weight_scale", "bias", "input_scale"):
            if (x := getattr(part, name)) is not None:
                own = getattr(whole, name)
                assert x.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layers_move_together(settings, dtype):
    model, alone = Attention(**settings), Attention(**settings).to(dtype)
    x = torch.randn(3, 256, dtype=dtype)
    (joint,) = join_named_(model, [GROUP])
    seen, before = counted(joint), joint.whole.weight.data_ptr()
    model.to(dtype)
    assert_one_product(model)
    assert model.k.bias.dtype == model.k.joint.whole.bias.dtype == dtype
    # Graphs may have seen it: what stays where it was has the memory it had.
    assert joint.whole.weight.data_ptr() == before
    for actual, own in zip(model(x), alone(x), strict=True):
        assert_same_bits(actual.contiguous(), own)
    assert len(seen) == 1
    model.to("meta")
    assert {x.device.type for x in model.state_dict().values()} == {"meta"}
    model.to_empty(device="cpu").load_state_dict(alone.state_dict())
    if "scaling" not in settings:
        assert_one_product(model)
    for actual, own in zip(model(x), alone(x), strict=True):
        assert_same_bits(actual.contiguous(), own)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_is_loaded_is_used(settings, assign):
    """In place it is in the product; tensors of others, and scales of each one, split it."""
    model, other, x = Attention(**settings), Attention(**settings), torch.randn(3, 256)
    other.k.weight_scale *= 2
    if other.k.input_scale is not None:
        other.k.input_scale *= 2
    join_named_(model, [GROUP])
    model.load_state_dict(other.state_dict(), assign=assign)
    is_split = assign or "scaling" in settings
    assert {type(part) for part in model.children()} == {Fp8Linear if is_split else JointPart}
    for actual, own in zip(model(x), other(x), strict=True):
        assert_same_bits(actual.contiguous(), own)


def test_a_saved_module_is_loaded_as_one_product():
    model, x = Attention(), torch.randn(3, 256)
    (joint,) = join_named_(model, [GROUP])
    before = [part.clone() for part in model(x)]
    model.q(x)  # a pass that ends here: its results are not saved
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.q.joint is not joint and loaded.q.joint._open is None
    assert_one_product(loaded)
    for actual, own in zip(loaded(x), before, strict=True):
        assert_same_bits(actual.contiguous(), own)


def test_weights_that_are_put_aside_split_the_product():
    """As accelerate does: past the attributes, by a forward that it has kept."""
    model, x = Attention(), torch.randn(3, 256)
    expected = [part(x) for part in model.children()]
    join_named_(model, [GROUP])
    kept = [part.forward for part in model.children()]
    for part in model.children():
        part._buffers["weight"] = part.weight.clone()
    for _ in range(2):
        for forward, own in zip(kept, expected, strict=True):
            assert torch.equal(forward(x), own)
    assert {type(part) for part in model.children()} == {Fp8Linear}


def test_a_replica_computes_alone():
    """DataParallel's: a copy of the attributes, with other tensors."""
    model, x = Attention(bias=False), torch.randn(3, 256)
    expected = [part(x) for part in model.children()]
    (joint,) = join_named_(model, [GROUP])
    replica = model.k._replicate_for_data_parallel()
    replica._parameters["bias"] = None
    replica._buffers["weight"] = model.k.weight.clone()
    seen = counted(joint)
    model.q(x)
    assert torch.equal(replica(x), expected[1]) and torch.equal(model.k(x), expected[1])
    assert type(model.k) is JointPart and len(seen) == 1


def test_a_copy_has_its_own_product():
    model, x = Attention(), torch.randn(3, 256)
    expected = model(x)
    (joint,) = join_named_(model, [GROUP])
    twin = copy.deepcopy(model)
    assert twin.q.joint is twin.v.joint is not joint
    joint.split_()
    for actual, own in zip(twin(x), expected, strict=True):
        assert torch.equal(actual, own)


def test_compiled_layers_share_their_code():
    models, x = [Attention() for _ in range(10)], torch.randn(3, 256)
    expected = models[0](x)
    counter = CompileCounter()
    for index, model in enumerate(models):
        for name, part in model.named_children():
            part.label = f"{index}.{name}"
        join_named_(model, [GROUP])
        model.compile(backend=counter, fullgraph=True)
        for actual, own in zip(model(x), expected, strict=True):
            assert torch.equal(actual, own)
    assert counter.frame_count == 1


def test_what_cannot_be_joined():
    model = Attention()
    for layers, problem in [
        ([model.q], "several layers"),
        ([model.q, nn.Linear(256, 16)], "1 of another kind"),
        ([model.q, Attention(depth=128).k], "one width"),
        ([model.q, Attention(bias=False).k], "a bias"),
        ([model.q, Attention(activation=None).k], "kind of scales"),
        (list(Attention(weight="tensor").children()), "per channel or block"),
        (list(Attention(sizes=(256, 120, 128)).children()), "outputs of 16"),
        (list(Attention(weight="block 128x128", sizes=(256, 64, 64)).children()), "outputs of 128"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            join_(layers)
    holder = nn.ModuleDict({"attn2": model})
    assert join_named_(holder, [GROUP], without=["attn2"]) == []
    assert join_named_(holder, [("q", "k", "other")]) == []
    assert len(join_named_(holder, [GROUP])) == 1
    assert join_named_(holder, [GROUP]) == []  # they are one already
    assert type(model.k) is JointPart


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 63, 500])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_on_a_gpu(settings, num_rows):
    model = Attention(device="cuda", depth=512, **settings).to(torch.bfloat16)
    x = torch.randn(num_rows, 512, device="cuda", dtype=torch.bfloat16)
    expected = model(x)
    join_named_(model, [GROUP])
    for actual, own in zip(model(x), expected, strict=True):
        # Another number of columns may have another order of sums.
        torch.testing.assert_close(actual.contiguous(), own, rtol=2.0**-7, atol=2.0**-6)
