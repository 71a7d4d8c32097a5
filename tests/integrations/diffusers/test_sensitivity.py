"""The sensitivity scan: what one layer does alone, found by replaying the plain run."""

import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo import (
    ConfigError,
    Recipe,
    UnsupportedError,
    apply_,
    scan_sensitivity,
)
from octavo.integrations.diffusers.call import Run
from octavo.integrations.diffusers.pipeline import find_components
from octavo.integrations.diffusers.sensitivity import (
    Scan,
    Sensitivity,
    SensitivityRow,
    overall,
    spread_evenly,
)
from octavo.integrations.fused_layers import block_of, group_of, pattern_of
from octavo.layers.linear import Fp8Linear
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.tiny_pipelines import FAMILIES, few, load_pipeline, run_pipeline

PROMPTS = ["a cat on a mat"]
PLANTED = "transformer_blocks.0.ff.net.2"


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def options_of(family, steps=2, **others):
    return {"num_inference_steps": steps, "call_options": FAMILIES[family].call, **others}


def plant(pipe):
    """A layer whose input has one large channel without weights: the rest is lost in its scale."""
    before = pipe.transformer.get_submodule("transformer_blocks.0.ff.net.0.proj")
    layer = pipe.transformer.get_submodule(PLANTED)
    before.bias[0] = 1e6
    layer.weight[:, 0] = 0


def has_fp8(pipe):
    parts = find_components(pipe).values()
    return any(isinstance(m, Fp8Linear) for part in parts for m in part.modules())


@pytest.fixture(scope="module")
def planted(folder_of):
    """A pipeline with one layer that matters, and its scan."""
    with torch.no_grad():
        # In float32, since small changes of one layer are lost in what others round in BF16.
        pipe = load_pipeline(folder_of("flux"), dtype=torch.float32)
        plant(pipe)
        before = run_pipeline(pipe, "flux")
        run = Run(num_inference_steps=2, call_options=FAMILIES["flux"].call)
        scan = Scan(pipe, "fp8")
        scan.record(PROMPTS, run, 1)
        found = scan.result("layer")
        assert_same_bits(run_pipeline(pipe, "flux"), before)  # as it was
        assert not has_fp8(pipe)
    return pipe, scan, found


def test_a_planted_layer_is_found_first(planted):
    _, _, found = planted
    first, second = found.rows[:2]
    assert (first.component, first.name) == ("transformer", PLANTED)
    assert first.error > 3 * second.error and found.floor == 0
    errors = [row.error for row in found.rows]
    assert errors == sorted(errors, reverse=True) and min(errors) > 0
    assert len(found.rows) == 17 and all(row.kept is None for row in found.rows)


def test_proposals_go_into_ignored_layers_and_lower_the_error(planted, folder_of):
    pipe, scan, found = planted
    proposed = found.propose()
    assert proposed == [PLANTED]
    assert scan.error() == found.error
    assert scan.error(proposed) < found.error / 2
    other = load_pipeline(folder_of("flux"))
    changes = apply_(other, Recipe(linear="fp8", ignored_layers=proposed))
    assert changes.left["transformer.linear"][PLANTED] == "ignored_layers"
    assert len(found.propose(reduction=0.99, max_share=0.9)) > 1
    assert found.propose(max_share=0.01) == []
    for name in ("reduction", "max_share"):
        with pytest.raises(ConfigError, match=f"expected {name} between 0 and 1, got 1"):
            found.propose(**{name: 1})
    assert not has_fp8(pipe)


def test_the_error_is_that_of_the_quantized_model(planted):
    """A row is what apply_ with all other layers ignored does to the same inputs."""
    pipe, scan, found = planted
    row = next(row for row in found.rows if row.name.endswith("proj_mlp"))
    layer = pipe.transformer.get_submodule(row.name)
    made = Fp8Linear.from_linear(layer, scan.settings)
    parent = pipe.transformer.get_submodule(row.name.rpartition(".")[0])
    parent.proj_mlp = made
    try:
        assert overall(scan.errors(["transformer"])) == row.error > 0
    finally:
        parent.proj_mlp = layer
    assert overall(scan.errors(["transformer"])) == 0


def test_groups_and_blocks_and_kept_layers(folder_of):
    pipe = load_pipeline(folder_of("wan"))
    run = Run(num_inference_steps=4, call_options=FAMILIES["wan"].call)
    scan = Scan(pipe, "fp8", ["attn1", "attn2"], is_all=True)
    with pytest.raises(ConfigError, match="expected a scan that has recorded"):
        scan.error()
    scan.record(PROMPTS, run, 2)
    found = scan.result("group")
    for component in ("transformer", "transformer_2"):
        rows = {row.name: row for row in found.rows if row.component == component}
        assert rows["blocks.*.ffn.net.2"].layers == ("blocks.0.ffn.net.2", "blocks.1.ffn.net.2")
        assert rows["blocks.*.ffn.net.2"].num_weights == 2 * 32 * 64
        assert rows["proj_out"].kept and rows["condition_embedder.time_proj"].kept
        assert all(row.pattern == name for name, row in rows.items())
        # The default is right: this one is the worst of all.
        assert max(rows.values(), key=lambda row: row.error).name == "proj_out"
    assert found.left == {
        f"{component}.condition_embedder.time_embedder.linear_{i}": "its model keeps it in float32"
        for component in ("transformer", "transformer_2")
        for i in (1, 2)
    }
    assert "proj_out" not in str(found.propose(reduction=0.99, max_share=0.99))
    names = [name for component, name, _ in scan.units("block") if component == "transformer"]
    assert names[:3] == ["blocks.0", "blocks.1", "condition_embedder.time_proj"]
    with pytest.raises(ConfigError, match="expected by, one of layer, group, block"):
        scan.units("model")
    with pytest.raises(ConfigError, match="expected passes of transformer_2, got none"):
        scan.record(PROMPTS, Run(num_inference_steps=1, call_options=run.call_options), 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", few())
def test_all_families(family, folder_of):
    pipe = load_pipeline(folder_of(family))
    plain = run_pipeline(pipe, family)
    options = options_of(family, steps=4 if family == "wan" else 2, num_timesteps=2)
    found = scan_sensitivity(pipe, PROMPTS, by="group", is_all=True, **options)
    assert found.floor == 0 and 0 < found.error < 0.1
    assert all(math.isfinite(row.error) for row in found.rows)
    assert any(row.kept for row in found.rows) and any(row.kept is None for row in found.rows)
    assert_same_bits(run_pipeline(pipe, family), plain)
    for pattern in found.propose(max_share=0.9):
        scan = apply_(
            load_pipeline(folder_of(family)), Recipe(linear="fp8", ignored_layers=[pattern])
        )
        assert scan.layers


def test_a_model_that_is_not_the_same_twice(folder_of):
    pipe = load_pipeline(folder_of("flux"))
    scale = [1.0]

    def drift(module, args, result):
        scale[0] += 0.01
        return (result[0] * scale[0],)

    pipe.transformer.transformer_blocks[0].attn.to_q.register_forward_hook(
        lambda module, args, result: result * scale[0]
    )
    with pytest.raises(UnsupportedError, match="without hooks, got some"):
        scan_sensitivity(pipe, PROMPTS, **options_of("flux"))
    pipe.transformer.transformer_blocks[0].attn.to_q._forward_hooks.clear()
    pipe.transformer.register_forward_hook(drift)
    with pytest.raises(UnsupportedError, match="turn dropout off"):
        scan_sensitivity(pipe, PROMPTS, **options_of("flux"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"linear": {"scaling": "static"}}, "expected 'fp8' or dynamic settings"),
        ({"ignored_layers": ["img_mpl"]}, "matches none"),
        ({"num_timesteps": 0}, "expected num_timesteps from 1 on"),
    ],
)
def test_what_is_refused(planted, options, said):
    with pytest.raises(ConfigError, match=said):
        scan_sensitivity(planted[0], PROMPTS, **options_of("flux"), **options)


def test_names():
    assert group_of("blocks.3.attn.to_out.0") == "blocks.*.attn.to_out.0"
    assert block_of("blocks.3.attn.to_out.0") == "blocks.3"
    assert group_of("proj_out") == block_of("proj_out") == "proj_out"
    names = ["a.0.b.x", "a.1.b.x", "a.0.c.b.x"]
    assert pattern_of(names[:2], "a.*.b.x", names[:2]) == "a.*.b.x"
    # A glob that would match a third layer gives way to an expression.
    assert pattern_of(names[:2], "a.*.b.x", names) == r"re:^(a\.0\.b\.x|a\.1\.b\.x)$"


def test_steps_are_spread_evenly():
    assert spread_evenly(20, 4) == {0, 6, 13, 19}
    assert spread_evenly(3, 8) == {0, 1, 2}
    assert spread_evenly(9, 1) == {4}


def make_rows(*errors):
    return tuple(
        SensitivityRow(
            component="t",
            name=f"l{i}",
            pattern=f"l{i}",
            layers=(f"l{i}",),
            num_weights=1,
            error=error,
            errors={0: error},
        )
        for i, error in enumerate(errors)
    )


def propose(*errors, **options):
    return Sensitivity(rows=make_rows(*errors), error=0.2, floor=0.0).propose(**options)


def test_the_fewest_layers_that_halve_the_error_are_proposed():
    # 9 + 4 + 8 · 0.25 = 15: without the first 6 are left, without the second 2, under 15 / 4.
    errors = (3.0, 2.0, *[0.5] * 8)
    assert propose(*errors) == ["l0", "l1"]
    assert propose(*errors, reduction=0.3) == ["l0"]
    assert propose(*errors, max_share=0.15) == []
    # All alike: to halve the error takes three quarters of them.
    assert propose(*[1.0] * 8) == []
    assert propose(*[1.0] * 8, max_share=0.75) == ["l0", "l1", "l2", "l3", "l4", "l5"]
    assert propose() == []


def test_results_that_are_not_finite_are_proposed_first():
    assert propose(math.nan, *[0.1] * 9, reduction=0.01) == ["l0", "l1"]
    assert propose(math.inf, 1.0, *[0.1] * 9) == ["l0", "l1"]
