"""Files that octavo wrote at commit ead51fe still load, with the content they had.

README.md says what they are and why they are never rewritten.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo import Recipe, load_fp8, load_scales
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import Calibration, load_state
from octavo.calibration.scale_file import LayerScales, ScaleHeader, save_scales
from octavo.calibration.state import StateFile
from octavo.cli.main import COMMANDS, make_app, run
from octavo.integrations.checkpoints.kv_scales import read_kv_scales
from octavo.layers.linear import Fp8Linear
from octavo.measure import store
from octavo.measure.evaluate.language import Client, Reply
from octavo.measure.evaluate.tasks import AnswerFile
from octavo.measure.records import Machine, Measurement
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.golden_content import ATTENTION, RECIPES, SCALE_SETS

GOLDEN = Path(__file__).parent / "ead51fe"
CHECKPOINTS = GOLDEN / "checkpoints"
ROUNDED = {x: torch.tensor(x, dtype=torch.float32).item() for x in (0.1, 0.2, 0.3, 0.7, 1 / 3)}
LLAMAS = {
    "channel": {"linear": {}, "ignored_layers": [], "weight_only_layers": ["down_proj"]},
    "static": {"linear": {"weight": "tensor", "scaling": "static"}, "ignored_layers": []},
    "blocks": {"linear": {"weight": "block 128x128"}, "ignored_layers": ["k_proj"]},
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("suffix", [".json", ".toml"])
@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name, suffix, tmp_path):
    golden = GOLDEN / "recipes" / (name + suffix)
    recipe = Recipe.load(golden)
    assert recipe == RECIPES[name]
    recipe.save(tmp_path / golden.name)
    assert (tmp_path / golden.name).read_bytes() == golden.read_bytes()


@pytest.mark.parametrize("name", SCALE_SETS)
def test_scale_files(name, tmp_path, recwarn):
    golden = GOLDEN / "scales" / f"{name}.json"
    scales = load_scales(golden)
    assert scales == SCALE_SETS[name] and not recwarn.list
    save_scales(tmp_path / golden.name, scales)
    assert (tmp_path / golden.name).read_bytes() == golden.read_bytes()


def test_the_state_of_an_interrupted_calibration():
    folder = GOLDEN / "state"
    calibration = Calibration(["a"], CalibrationSettings(rotate_keys=True))
    state = StateFile(path=folder / "kv.json.partial", key={"model": "tiny"})
    assert load_state(calibration, state) and calibration.num_prompts == 5
    ended = calibration.result(ScaleHeader(kind="kv_cache", model="tiny")).scales
    golden = load_scales(folder / "kv.json")
    assert ended.layers == golden.layers and ended.header.rotate_keys
    # The largest value is 1 and rotation keeps sums of squares: no scale can be beyond these.
    assert golden.layers["a"].q < 8**0.5 * 1.5 / 448 and golden.layers["a"].k < 1.5 / 60


def assert_same_output(actual, expected):
    """Within a quarter of what FP8 costs: other hardware sums in another order.

    A sum that differs in its last bit moves a few activations to the next FP8 number; the error of
    FP8 is that of all of them together. A scale that is lost or misread is far beyond it.
    """
    output, plain = expected["output"], expected["plain_output"]
    error_of_fp8 = (output - plain).square().mean().sqrt()
    assert 0 < error_of_fp8 < 0.2 * plain.square().mean().sqrt()
    assert (actual - output).square().mean().sqrt() < error_of_fp8 / 4


def assert_same_tensors(folder, golden, name):
    ours, theirs = load_file(folder / name), load_file(golden / name)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert_same_bits(ours[key], tensor)


@pytest.mark.parametrize("through", ["load_fp8", "from_pretrained"])
@pytest.mark.parametrize("name", LLAMAS)
def test_checkpoints_of_transformers(name, through, tmp_path):
    transformers = pytest.importorskip("transformers")
    from octavo import OctavoConfig

    golden, kind = CHECKPOINTS / f"llama-{name}", transformers.AutoModelForCausalLM
    model = load_fp8(kind, golden) if through == "load_fp8" else kind.from_pretrained(golden)
    assert model.config.quantization_config == OctavoConfig(**LLAMAS[name])
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    kept = ["k_proj"] if name == "blocks" else []
    assert len(layers) == 7 - len(kept) and not any(n.endswith(tuple(kept)) for n in layers)
    stored = load_file(golden / "model.safetensors")
    for layer, module in layers.items():
        assert_same_bits(module.weight, stored[f"{layer}.weight"])
        assert module.weight.dtype == torch.float8_e4m3fn
    expected = load_file(CHECKPOINTS / f"llama-{name}.safetensors")
    logits = model(input_ids=expected["input_ids"], use_cache=False).logits
    assert_same_output(logits, expected)
    model.save_pretrained(tmp_path)
    assert_same_tensors(tmp_path, golden, "model.safetensors")
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (tmp_path, golden))
    assert ours["quantization_config"] == theirs["quantization_config"]


def test_checkpoints_of_diffusers(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    from octavo.integrations.diffusers import OctavoDiffusersConfig

    golden = CHECKPOINTS / "flux-transformer"
    model = diffusers.FluxTransformer2DModel.from_pretrained(golden)
    config = OctavoDiffusersConfig("fp8", weight_only_layers=["modulation"])
    assert model.config["quantization_config"].to_dict() == config.to_dict()
    assert isinstance(model.transformer_blocks[0].attn.to_k, Fp8Linear)
    expected = load_file(CHECKPOINTS / "flux-transformer.safetensors")
    inputs = {key: x for key, x in expected.items() if "output" not in key}
    assert_same_output(model(**inputs).sample, expected)
    model.save_pretrained(tmp_path)
    assert_same_tensors(tmp_path, golden, "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize(
    "kind, layer",
    [
        (
            "compressed-tensors",
            LayerScales(
                q=(ROUNDED[0.3], ROUNDED[0.2]),
                k=(ROUNDED[0.1], ROUNDED[0.7]),
                v=(ROUNDED[1 / 3], ROUNDED[1 / 3]),
            ),
        ),
        ("modelopt", LayerScales(q=None, k=ROUNDED[0.1], v=ROUNDED[1 / 3])),
    ],
)
def test_exported_checkpoints(kind, layer):
    found = read_kv_scales(CHECKPOINTS / f"export-{kind}")
    assert found is not None and dict(found.layers) == {ATTENTION.format(0): layer}


def test_a_record_of_each_operation(tmp_path):
    golden = GOLDEN / "records" / "one_of_each.jsonl"
    rows = store.read(golden)
    documents = [json.loads(line) for line in golden.read_text().splitlines()]
    assert len({row.op for row in rows}) == 36 and len(rows) == len(documents) == 65
    for row, document in zip(rows, documents, strict=True):
        machine = document.pop("machine")
        capability = None if machine["capability"] is None else (9, 0)
        assert row.machine == Machine(**{**machine, "capability": capability})
        for field, value in document.items():
            assert getattr(row, field) == value, field
    store.append(tmp_path / "again.jsonl", rows)
    assert (tmp_path / "again.jsonl").read_bytes() == golden.read_bytes()


def test_a_record_at_the_edges(tmp_path):
    golden = GOLDEN / "records" / "edges.jsonl"
    (row,) = store.read(golden)
    assert math.isnan(row.values["nan"])
    assert row == Measurement(
        op="edges",
        impl="é 🙂",
        case={"text": 'a "b"\n', "count": 2**60, "ratio": 0.1, "is_true": True},
        values={
            "nan": row.values["nan"],
            "inf": math.inf,
            "low": -math.inf,
            "tiny": 5e-324,
        },
        machine=Machine(
            cpu="c", python="3.11.7", platform="Linux aarch64", versions={"torch": "2"}
        ),
        command="octavo",
        date="2026-11-17T10:00:00Z",
    )
    store.append(tmp_path / "again.jsonl", [row])
    assert (tmp_path / "again.jsonl").read_bytes() == golden.read_bytes()


@pytest.mark.parametrize(
    "kind, flags, last, score",
    [
        (
            "choice",
            ["--temperature", "0.7"],
            ("dca14dbf94d5846258713917", Reply("<think>hm</think>\n**Answer: B**", False, 31)),
            100,
        ),
        (
            "math",
            [],
            ("67e7d470c823ce3c80aa9ad2", Reply("Well: $\\boxed{12}$ ☕", False, 20)),
            0,
        ),
    ],
)
def test_answer_files_are_resumed_without_a_question(
    kind, flags, last, score, tmp_path, monkeypatch
):
    pytest.importorskip("httpx")
    if kind == "math":
        pytest.importorskip("math_verify")
    golden = GOLDEN / "answers" / f"{kind}.jsonl"
    answers, records = tmp_path / golden.name, tmp_path / "records.jsonl"
    answers.write_bytes(golden.read_bytes())
    key, reply = last
    assert AnswerFile(answers, is_resumed=True).reply(key) == reply

    def ask(*args):
        pytest.fail("an answer of the file was asked for again")

    monkeypatch.setattr(Client, "_ask", ask)
    words = ["eval", kind, "--endpoint", "golden=http://localhost:8000", "-n", "3", *flags]
    words += ["--served-model-name", "tiny", "--answers", str(answers), "--resume"]
    assert run(make_app(COMMANDS), [*words, "-o", str(records)]) == 0
    assert answers.read_bytes() == golden.read_bytes()
    (now,), (before,) = (
        store.read(records),
        store.read(GOLDEN / "answers" / f"{kind}_records.jsonl"),
    )
    # Since then math-verify judges answers, in place of our own rules and --checker.
    kept = {name: one for name, one in before.case.items() if name != "checker"}
    assert now.case.items() >= kept.items() and now.values == before.values
    assert now.command == before.command.replace("--checker octavo ", "")
    assert now.values["score_percent"] == score
