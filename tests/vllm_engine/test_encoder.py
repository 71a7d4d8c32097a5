"""--mm-encoder-attn-dtype fp8 in vLLM's engine, with images: the plug-in absent and present."""

import importlib.metadata
import json

import pytest

from octavo.calibration.scale_file import load_scales
from octavo_testkit.vllm_engine.engines import apart, run_engines

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.metadata.version("vllm").startswith("0.26"),
        reason="vLLM 0.26 cannot process the images of these models",
    ),
]

FP8 = {"mm_encoder_attn_dtype": "fp8"}
LAYERS = [f"visual.blocks.{index}.attn.attn" for index in range(2)]
# The RMS difference of log-probabilities; scales that cut values off are tested to be beyond it.
BUDGET = 0.15
MARGIN = 1.25
LOG = "octavo runs attention in FP8 in 2 layers of the vision encoder, with "


def prompts_with_images(count):
    """Odd numbers of patches, and no image twice: vLLM would not encode it again."""
    from octavo_testkit.vllm_engine.tiny_models import IMAGE

    sizes = [(84, 112), (56, 140), (126, 70), (140, 140)]
    return [
        {"tokens": [7 + index, 9, *IMAGE, 20 + index, 11], "image": [*sizes[index % 4], index]}
        for index in range(count)
    ]


def scale_file(path, layers, scale):
    """A file in vLLM's own form."""
    path.write_text(json.dumps({name: dict.fromkeys("qkv", scale) for name in layers}))
    return {**FP8, "mm_encoder_fp8_scale_path": str(path)}


def engine_of(models, name):
    return {
        "model": str(models / name),
        "max_tokens": 8,
        "max_num_batched_tokens": 1024,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("encoder")


@pytest.fixture(scope="module")
def answers(models, folder):
    qwen2, qwen3 = (engine_of(models, name) for name in ("qwen2_vl", "qwen3_vl"))
    saved = str(folder / "saved.json")
    # One image in each pass.
    save = {"max_num_seqs": 1, "max_tokens": 1, "prompts": prompts_with_images(16)}
    save |= {"mm_encoder_fp8_scale_save_path": saved, "mm_encoder_fp8_scale_save_margin": MARGIN}
    jobs = {
        "bf16": qwen2,
        "fp8": {**qwen2, **FP8},
        "save": {**qwen2, **FP8, **save},
        "load": {**qwen2, **FP8, "mm_encoder_fp8_scale_path": saved},
        "cut off": {**qwen2, **scale_file(folder / "small.json", LAYERS, 0.0005)},
        "missing": {**qwen2, **scale_file(folder / "missing.json", LAYERS[:1], 0.01)},
        "zero": {**qwen2, **scale_file(folder / "zero.json", LAYERS, 0.0)},
        "qwen3 bf16": qwen3,
        "qwen3 fp8": {**qwen3, **FP8},
    }
    return run_engines(jobs, folder / "present", prompts=prompts_with_images(4))


@pytest.fixture(scope="module")
def absent(models, folder):
    qwen2 = engine_of(models, "qwen2_vl")
    jobs = {"bf16": qwen2, "fp8": {**qwen2, **FP8}}
    prompts = prompts_with_images(4)
    return run_engines(jobs, folder / "absent", prompts=prompts, VLLM_PLUGINS="")


def scaling_of(answer):
    """How each layer finds its scales."""
    return {name: scaling for name, (_, scaling) in answer["encoder"].items()}


def test_without_fp8_answers_are_vllms_to_the_bit(answers, absent):
    assert {kind for kind, _ in absent["bf16"]["encoder"].values()} == {"MMEncoderAttention"}
    assert scaling_of(answers["bf16"]) == dict.fromkeys(LAYERS)
    for part in ("tokens", "logprobs"):
        assert answers["bf16"][part] == absent["bf16"][part]
    assert answers["bf16"]["log"] == []


def test_without_the_plug_in_vllm_refuses_fp8(absent):
    assert "requires either the ROCM_AITER_FA backend" in absent["fp8"]["error"]


@pytest.mark.parametrize("family", ["", "qwen3 "])
def test_answers_in_fp8_are_within_the_budget(answers, family):
    bf16, fp8 = answers[f"{family}bf16"], answers[f"{family}fp8"]
    rms, num_tokens = apart(bf16, fp8)
    assert 0.002 < rms < BUDGET
    assert num_tokens >= 10
    assert fp8["log"] == [f"{LOG}dynamic scales"]
    scaling = scaling_of(fp8)
    assert sorted(scaling) == LAYERS
    for found in scaling.values():
        assert found["kind"] == "DynamicScaling"
        assert found["num_passes"] >= 1


def test_saved_scales_have_the_margin_and_are_read_by_both(answers, folder):
    from vllm.model_executor.layers.attention import mm_encoder_attention as own

    answer, path = answers["save"], folder / "saved.json"
    ours, theirs = load_scales(path, strict=True), own._load_fp8_scales_file(str(path))
    assert [*ours.layers] == LAYERS == [*theirs]
    assert (ours.header.margin, ours.header.passes) == (MARGIN, 16)
    for name, found in scaling_of(answer).items():
        assert found["num_passes"] == 16
        entry = ours.layers[name]
        for key in "qkv":
            assert getattr(entry, key) == pytest.approx(MARGIN * found[key])
            assert theirs[name][key] == getattr(entry, key)
    assert answer["log"][1:] == [f"octavo has saved the encoder's scales to {path}"]


def test_saved_scales_are_loaded_by_the_next_run(answers, folder):
    answer = answers["load"]
    path = folder / "saved.json"
    assert answer["log"] == [f"{LOG}static scales from {path}"]
    for name, found in scaling_of(answer).items():
        entry = load_scales(path).layers[name]
        assert found["kind"] == "StaticScaling"
        assert [found[key] for key in "qkv"] == pytest.approx([entry.q, entry.k, entry.v])
    assert 0.002 < apart(answers["bf16"], answer)[0] < BUDGET


def test_scales_that_cut_values_off_are_beyond_the_budget(answers):
    assert apart(answers["bf16"], answers["cut off"])[0] > 2 * BUDGET


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "CheckpointError: expected scales for 'visual.blocks.1.attn.attn', got none"),
        ("zero", "expected q to be a positive finite number"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(answers, name, reason):
    assert reason in answers[name]["error"]


def test_each_of_two_processes_has_scales_of_its_own_heads(models, answers, folder):
    engine = {**engine_of(models, "qwen2_vl"), **FP8, "tensor_parallel_size": 2}
    processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    prompts = prompts_with_images(4)
    answer = run_engines({"two": engine}, folder / "two", prompts=prompts, **processes)["two"]
    assert 0.002 < apart(answers["bf16"], answer)[0] < BUDGET
    first, both = scaling_of(answer), scaling_of(answers["fp8"])
    for name in LAYERS:
        assert 0 < first[name]["v"] < 1.1 * both[name]["v"]
    assert any(first[name]["v"] < 0.99 * both[name]["v"] for name in LAYERS)
    log = (folder / "two" / "log").read_text()
    assert log.count(f"{LOG}dynamic scales") == 2  # once in each worker
