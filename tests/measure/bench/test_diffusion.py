"""One step of a diffusion transformer: who takes part, what is checked, what records say."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo.errors import ConfigError
from octavo.integrations.diffusers import full_size
from octavo.layers.linear import Fp8Linear
from octavo.measure.bench import diffusion
from octavo.measure.bench.benchmark import Objection
from octavo.measure.bench.diffusion import StepCase, run_step
from octavo.measure.records import Measurement

CPU = torch.device("cpu")
STATIC = ("linear-static", "linear-static+attention", "linear-static+attention-static")
EAGER = StepCase("tiny-flux", ("bf16", "linear+attention"), is_compiled=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion, "time_alone", lambda *_, **__: {"median_ms": 1.0})


def run_all(case: StepCase) -> tuple[list[Measurement], list[Objection]]:
    parts = list(run_step(case, CPU, "octavo bench diffusion"))
    records = [record for found, _ in parts for record in found]
    return records, [objection for _, found in parts for objection in found]


def test_records_name_the_baseline_and_the_errors() -> None:
    records, objections = run_all(EAGER)
    plain, fp8 = records
    assert [r.case["recipe"] for r in records] == ["bf16", "linear+attention"]
    assert (plain.impl, fp8.impl) == ("diffusers", "octavo")
    assert fp8.baseline == "diffusers BF16, native"
    assert fp8.case["attention"] == "octavo FP8" and plain.case["attention"] == "native BF16"
    assert plain.values["relative_rms"] == 0 < fp8.values["relative_rms"]
    assert 0.01 < fp8.values["linear_relative_rms"] <= diffusion.MAX_LINEAR_ERROR
    assert 0.01 < fp8.values["attention_relative_rms"] <= diffusion.MAX_ATTENTION_ERROR
    assert fp8.values["weight_bytes_ratio"] < 0.95
    assert {o.name for o in objections} == {"cudnn"}


def test_modulation_in_fp8_weights_takes_less_memory() -> None:
    names = ("bf16", "linear+attention", "linear+attention+modulation")
    records, _ = run_all(replace(EAGER, recipes=names))
    _, without, weight_only = (record.values for record in records)
    assert weight_only["weight_bytes_ratio"] < without["weight_bytes_ratio"] - 0.02
    assert weight_only["linear_relative_rms"] <= diffusion.MAX_LINEAR_ERROR
    assert without["relative_rms"] != weight_only["relative_rms"]


def test_static_scales_are_of_the_steps_own_inputs() -> None:
    names = ("bf16", "linear+attention", *STATIC)
    parts = run_step(replace(EAGER, recipes=names), CPU, "octavo bench diffusion")
    seen = [found for found, _ in parts]
    # Each as it is done: a crash later on loses nothing of what was measured.
    assert [[r.case["recipe"] for r in found] for found in seen] == [[name] for name in names]
    records = [record for found in seen for record in found]
    linear = [record.values["linear_relative_rms"] for record in records[1:]]
    attention = [record.values["attention_relative_rms"] for record in records[1:]]
    assert linear[0] != linear[1] == linear[2] == linear[3]
    assert len(set(attention)) == 4  # dynamic, BF16, dynamic, static
    assert [records[i].case["attention"] for i in (2, 3)] == ["native BF16", "octavo FP8"]


def test_a_model_without_modulation_layers_is_an_objection() -> None:
    names = ("bf16", "linear+attention+modulation")
    case = StepCase("tiny-wan", names, is_compiled=False)
    records, objections = run_all(case)
    assert [r.case["recipe"] for r in records] == ["bf16"]
    assert objections[-1].operands == names[1]
    assert "pattern 'modulation' matches none" in objections[-1].reason


def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Fp8Linear.forward
    monkeypatch.setattr(Fp8Linear, "forward", lambda self, x: 1.1 * forward(self, x))
    records, objections = run_all(EAGER)
    assert [r.case["recipe"] for r in records] == ["bf16"]
    assert "linear layers with a relative error" in objections[-1].reason


def test_attention_that_sees_nothing_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(result: Any) -> Any:
        return 0 * result if isinstance(result, torch.Tensor) else [0 * x for x in result]

    def apply_and_blind(model: Any, recipe: Any) -> None:
        for layer in full_size.find_layers(model).values():
            forward = layer.forward
            layer.forward = lambda *a, _forward=forward, **k: nothing(_forward(*a, **k))

    monkeypatch.setattr(diffusion, "apply_", apply_and_blind)
    case = replace(EAGER, recipes=("bf16", "attention"))
    records, objections = run_all(case)
    assert len(records) == 1 and "attention layers" in objections[-1].reason


def test_who_cannot_run_and_does_not_say_why_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use = full_size.use_bf16_attention_

    def fail(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def use_or_fail(model: Any, name: str) -> None:
        if name == "native":
            use(model, name)
        elif isinstance(model, torch.nn.ModuleList):
            model[0].forward = fail

    monkeypatch.setattr(full_size, "use_bf16_attention_", use_or_fail)
    records, objections = run_all(replace(EAGER, recipes=("bf16",)))
    assert records[0].case["attention"] == "native BF16"
    assert [(o.name, o.reason) for o in objections] == [("cudnn", "NotImplementedError")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("size", ["tiny-flux", "tiny-qwen", "tiny-wan"])
def test_compiled_models_are_themselves(size: str) -> None:
    case = StepCase(size, ("bf16", "linear"), num_layers=2)
    records, _ = run_all(case)
    assert len(records) == 2
    assert all(r.values["compiled_relative_rms"] < 0.02 for r in records)
    assert records[1].case["layers"] == 2


@pytest.mark.parametrize(
    ("size", "recipes"), [("flux", ("bf16",)), ("tiny-flux", ("linear",)), ("tiny-flux", ("fp8",))]
)
def test_unknown_sizes_and_recipes_raise(size: str, recipes: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        StepCase(size, recipes)


def test_what_a_class_keeps_in_float32_stays() -> None:
    size = full_size.find_full_size("tiny-wan")
    model = full_size.make_transformer(size, CPU)
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds["scale_shift_table"] == kinds["blocks.0.norm2.weight"] == torch.float32
    assert kinds["blocks.0.attn1.to_q.weight"] == torch.bfloat16


def test_full_sizes_have_the_tokens_that_they_say() -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape)

    flux = full_size.FULL_SIZES["flux.1-dev"].make_inputs(draw)
    assert flux["hidden_states"].shape[1] + flux["encoder_hidden_states"].shape[1] == 4608
    frames, height, width = (
        full_size.FULL_SIZES["wan2.2-14b"].make_inputs(draw)["hidden_states"].shape[2:]
    )
    assert frames * height * width // 4 == 75600
