"""Text and image quantized from where they are: as both concatenated, and nobody concatenates."""

import threading
import weakref
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from torch._dynamo.backends.common import aot_autograd

from octavo import Recipe, apply_, ops
from octavo.integrations.diffusers.attention import find_layers
from octavo.integrations.diffusers.processors import Left, take_left
from octavo.numerics.qk_norm import QkNorm
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.fused_models import make, run

NUM_TEXT = 16
# The compiler's own imports use what torch has deprecated; which ones depends on the version.
pytestmark = [
    pytest.mark.usefixtures("without_gradients"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def make_fp8(family):
    model, inputs = make(family, torch.bfloat16)
    apply_(model, Recipe(attention="fp8"))
    return model, inputs


@contextmanager
def concatenated():
    """Layers note nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Left, "note", lambda self, name, x: x)
        yield


@contextmanager
def lengths_of_first():
    """How many tokens each call of `quantize_qkv` has in front; None without."""
    lengths, quantize = [], ops.quantize_qkv

    def note(*args, first=None, **options):
        lengths.append(None if first is None else first[0].shape[1])
        return quantize(*args, first=first, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "quantize_qkv", note)
        yield lengths


@pytest.mark.parametrize(
    ("family", "expected"),
    [("flux", [NUM_TEXT] * 2 + [None] * 2), ("flux2", [5, None]), ("qwen", [NUM_TEXT] * 2)],
)
def test_results_are_those_of_the_concatenation(family, expected):
    model, inputs = make_fp8(family)
    if family == "qwen":
        mask = torch.ones(2, NUM_TEXT, dtype=torch.bool)
        mask[0, 5:] = False
        inputs["encoder_hidden_states_mask"] = mask
    with lengths_of_first() as lengths:
        result = run(model, inputs)
    assert lengths == expected
    with lengths_of_first() as lengths, concatenated():
        assert_same_bits(run(model, inputs), result)
    assert lengths == [None] * len(expected)


def count_concatenations(layer, *args, **options):
    """Of tensors with four dimensions, as q, k and v are, in the graph of a compiled layer."""
    found = []

    def record(graph, inputs):
        graph.graph.eliminate_dead_code()
        cats = [node for node in graph.graph.nodes if node.target is torch.ops.aten.cat.default]
        found.append(sum(node.meta["val"].dim() == 4 for node in cats))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    result = compiled(*args, **options)
    for x, expected in zip(result, layer(*args, **options), strict=True):
        assert_same_bits(x, expected)
    (count,) = found
    return count


@pytest.mark.parametrize("family", ["flux", "z_image"])
def test_a_compiled_block_may_be_the_first_call_of_a_thread(family):
    """As after `apply_` and `compile_repeated_blocks`, without a step in between."""
    model, inputs = make(family, torch.bfloat16)
    apply_(model, Recipe(attention="fp8"))
    expected, found = run(model, inputs), []
    torch.compiler.reset()
    model.compile_repeated_blocks(fullgraph=True, backend="eager")

    def call():
        with torch.no_grad():
            found.append(run(model, inputs))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(found) == 1 and torch.equal(found[0], expected)


def test_compiled_layers_concatenate_nothing():
    model, _ = make_fp8("flux")
    layer = model.transformer_blocks[0].attn
    image, text = (torch.randn(2, n, 64).bfloat16() for n in (9, 5))
    assert count_concatenations(layer, image, encoder_hidden_states=text) == 0
    with concatenated():
        assert count_concatenations(layer, image, encoder_hidden_states=text) == 3
    assert take_left() is None


def test_joint_projections_of_diffusers_are_concatenated():
    model, inputs = make_fp8("flux")
    for layer in find_layers(model).values():
        layer.fuse_projections()
    with lengths_of_first() as lengths:
        result = run(model, inputs)
    assert lengths == [None] * 4
    with concatenated():
        assert_same_bits(run(model, inputs), result)


def test_a_model_inside_another_has_streams_of_its_own():
    (outer, inputs), (inner, _) = make_fp8("flux"), make_fp8("flux")
    expected = run(outer, inputs)

    def run_inner(*_):
        run(inner, {**inputs, "hidden_states": -inputs["hidden_states"]})

    outer.transformer_blocks[0].attn.add_v_proj.register_forward_hook(run_inner)
    with lengths_of_first() as lengths:
        assert_same_bits(run(outer, inputs), expected)
    one = [NUM_TEXT] * 2 + [None] * 2
    assert lengths == one + one


def test_nothing_is_kept():
    """Neither after the backend's call nor after an error in the middle of one."""
    model, inputs = make_fp8("flux")
    layer, made, alive = model.transformer_blocks[0].attn, [], []

    def made_by(module, args, result):
        made.append(weakref.ref(result))

    for projection in (layer.to_v, layer.add_v_proj):
        projection.register_forward_hook(made_by)
    layer.to_out[0].register_forward_hook(lambda *_: alive.extend(x() is not None for x in made))
    run(model, inputs)
    assert alive == [False, False]

    def fail(*_):
        raise RuntimeError("no keys of the text")

    made.clear()
    layer.add_k_proj.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no keys of the text"):
        run(model, inputs)
    assert take_left() is None
    assert len(made) == 1 and made[0]() is None


def test_streams_that_do_not_add_up_are_not_taken():
    whole = tuple(torch.zeros(2, 7, 2, 8) for _ in "qkv")
    parts = {name: torch.zeros(2, 4, 2, 8) for name in "qkv"}
    parts |= {f"first_{name}": torch.zeros(2, 3, 2, 8) for name in "qkv"}

    def take(num_first=3, **changes):
        streams = Left(None, QkNorm(*torch.ones(2, 2, 8), 1e-6, num_first), None)
        for name, x in (parts | changes).items():
            if x is not None:
                streams.note(name, x)
        found = streams.take_streams(whole)
        assert streams.take_streams(whole) is None
        return found

    (q, _, _), (_, _, v) = take(first_v=torch.ones(2, 3, 16))
    assert q is parts["q"] and v.shape == (2, 3, 2, 8) and v.all()
    for name in parts:
        assert take(**{name: None}) is None
        assert take(**{name: parts[name].double()}) is None
        assert take(**{name: parts[name][:1]}) is None
    assert take(num_first=2) is None
    assert take(first_k=torch.zeros(2, 2, 2, 8)) is None
    assert take(v=torch.zeros(2, 4, 17)) is None
