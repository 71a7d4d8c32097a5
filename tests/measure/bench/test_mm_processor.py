"""The stages of requests with images, and vLLM's two runs: save scales, then load them."""

import json

import pytest
import torch

from octavo.calibration.scale_file import load_scales
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.apply import restore_
from octavo.integrations.transformers.encoder_options import EncoderOptions
from octavo.integrations.transformers.vision_graphs import VisionGraphs
from octavo.integrations.transformers.vision_language import TinyModel, find_tower
from octavo.layers.encoder_attention import EncoderAttention
from octavo.measure.bench import mm_processor
from octavo.measure.bench.mm_processor import STAGES, run_mm_processor
from octavo.measure.bench.requests import (
    ImagePrompt,
    ImageRequests,
    make_image_prompts,
    parse_buckets,
)
from octavo.ops.select import _named, register_impl, unregister_impl

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

SMALL = "{(64, 64, 1): 0.5, (64, 96, 1): 0.5}"
KEYS = {
    *("completed", "failed", "mean_e2el_ms", "median_e2el_ms", "std_e2el_ms"),
    *("percentiles_e2el_ms", "mm_processor_stats", "encoder_summary", "config", "timestamp"),
}


@pytest.fixture(scope="module")
def tiny():
    return TinyModel(torch.device("cpu"))


@pytest.fixture
def language(tiny):
    """The tiny model, as it was made; what a test applies is undone."""
    yield tiny
    if any(isinstance(m, EncoderAttention) for m in tiny.model.modules()):
        restore_(tiny.model)


def requests(number=2, **options):
    return make_image_prompts(ImageRequests(num_prompts=number, bucket_config=SMALL, **options))


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, EncoderAttention)]


def test_fields_and_stages(language):
    result = run_mm_processor(
        language, requests(3), EncoderOptions(), output_len=2, percentiles=[50, 99]
    )
    assert result.keys() >= KEYS and json.loads(json.dumps(result)) == result
    assert (result["completed"], result["failed"], result["errors"]) == (3, 0, [])
    stats = result["mm_processor_stats"]
    assert set(stats) == set(STAGES) - {"num_encoder_calls"}
    assert set(stats["encoder_forward"]) == {"mean", "median", "std", "p50.0", "p99.0"}
    for stage in ("get_mm_hashes", "get_cache_missing_items", "merge_mm_kwargs"):
        assert stats[stage]["mean"] == 0
    parts = stats["apply_hf_processor"]["mean"] + stats["apply_prompt_updates"]["mean"]
    assert 0 < parts <= stats["preprocessor_total"]["mean"]
    whole = stats["preprocessor_total"]["mean"] + stats["encoder_forward"]["mean"]
    assert stats["encoder_forward"]["mean"] > 0 and whole < result["mean_e2el_ms"]
    assert result["encoder_summary"] == {
        "total_encoder_calls": 3,
        "num_requests_with_encoder_calls": 3,
    }
    assert [p for p, _ in result["percentiles_e2el_ms"]] == [50, 99]
    assert result["config"]["output_len"] == 2
    assert not find_tower(language.model)._forward_hooks


def test_scales_are_saved_and_loaded(language, tmp_path):
    """vLLM's two-step flow: names, margin and passes are as a dynamic run of 16 has them."""
    path = tmp_path / "scales.json"
    first = EncoderOptions(attn_dtype="fp8", fp8_scale_save_path=path, fp8_scale_save_margin=2.0)
    assert run_mm_processor(language, requests(15), first)["completed"] == 15
    dynamic = [layer.scaling.scales(2.0) for layer in layers_of(language.model)]
    saved = load_scales(path)
    assert list(saved.layers) == [f"visual.blocks.{i}.attn.attn" for i in range(2)]
    assert saved.header.margin == 2.0 and saved.header.passes == 16
    assert (saved.header.kind, saved.header.model) == ("vision_attention", language.name)
    for scales, entry in zip(dynamic, saved.layers.values(), strict=True):
        assert (float(scales.q), float(scales.v)) == pytest.approx((entry.q, entry.v))
    restore_(language.model)
    second = EncoderOptions(attn_dtype="fp8", fp8_scale_path=path, attn_backend="reference")
    assert run_mm_processor(language, requests(1), second)["completed"] == 1
    for layer, entry in zip(layers_of(language.model), saved.layers.values(), strict=True):
        assert float(layer.scaling.k) == pytest.approx(entry.k) and layer.impl == "reference"


def test_too_few_passes_are_noticed_at_the_start(language, tmp_path):
    options = EncoderOptions(attn_dtype="fp8", fp8_scale_save_path=tmp_path / "s.json")
    with pytest.raises(ConfigError, match="saved after 16 passes: .* got 3"):
        run_mm_processor(language, requests(2), options)
    assert not layers_of(language.model)


def test_contradictions(tmp_path):
    here = tmp_path / "s.json"
    here.write_text("{}")
    cases = [
        ({"fp8_scale_path": here, "fp8_scale_save_path": here, "attn_dtype": "fp8"}, "got both"),
        ({"fp8_scale_path": here}, "expected attention in fp8 for scales"),
        ({"fp8_scale_save_path": here}, "expected attention in fp8 for scales"),
        ({"attn_dtype": "fp8", "fp8_scale_path": tmp_path / "none.json"}, "expected a scale file"),
        ({"attn_dtype": "fp8", "fp8_scale_save_path": tmp_path / "no" / "s"}, "existing folder"),
        ({"attn_dtype": "fp8", "fp8_scale_save_margin": 0.0}, "margin must be"),
        ({"attn_dtype": "fp8", "fp8_scale_save_margin": float("nan")}, "margin must be"),
        ({"attn_dtype": "fp8", "fp8_scale_save_margin": 1.5}, "a path to save .* margin 1.5, got"),
        ({"fp8_scale_save_margin": 2.0}, "a path to save .* margin 2, got none"),
        ({"attn_dtype": "int8"}, "expected an encoder attention dtype of fp8, got 'int8'"),
        ({"attn_backend": "reference"}, "a backend is chosen for attention in fp8"),
        (
            {"attn_dtype": "fp8", "attn_backend": "FLASH_ATTN"},
            "one of gluon, triton, reference, .*FLASHINFER.*; got 'FLASH_ATTN', a name of vLLM's",
        ),
        ({"attn_dtype": "fp8", "attn_backend": "TORCH_SDPA"}, "expected a backend of octavo's"),
        ({"attn_dtype": "fp8", "attn_backend": "torch"}, "reference, .*; got 'torch'$"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            EncoderOptions(**options)


def test_a_backend_that_cannot_run_here_raises(language):
    """At the start: no request runs, and the model is as it was."""
    options, done = EncoderOptions(attn_dtype="fp8", attn_backend="gluon"), []
    with pytest.raises(UnsupportedError, match="impl='gluon' cannot run"):
        run_mm_processor(language, requests(1), options, progress=lambda: done.append(1))
    assert not done and not layers_of(language.model)


def test_graphs_are_asked_for_and_refused_at_the_start(language, monkeypatch):
    options = EncoderOptions(attn_dtype="fp8", graph_budgets=(16, 64))
    with pytest.raises(UnsupportedError, match="CUDA graphs need a CUDA GPU"):
        run_mm_processor(language, requests(1), options)
    assert not layers_of(language.model)
    monkeypatch.setattr(VisionGraphs, "objection", VisionGraphs._objection_to_attention)
    with pytest.raises(UnsupportedError, match="attention 'sdpa' asks .* apply_ a recipe"):
        run_mm_processor(language, requests(1), EncoderOptions(graph_budgets=(16,)))
    replayed = []

    def replay(self, hidden_states, grid_thw, budget):
        replayed.append(budget)
        return self.run_padded(hidden_states, grid_thw)

    monkeypatch.setattr(VisionGraphs, "replay", replay)
    result = run_mm_processor(language, requests(3), options)
    assert result["encoder_summary"]["total_encoder_calls"] == 3
    assert len(replayed) == 4 and set(replayed) <= {16, 64}  # with the warm-up
    assert result["mm_processor_stats"]["encoder_forward"]["mean"] > 0


def test_a_registered_backend_runs(language):
    calls = []

    def run(*args, **kwargs):
        calls.append(args)
        return reference.run(*args, **kwargs)

    reference = _named("attention", "reference")
    register_impl("attention", "ours", run)
    try:
        options = EncoderOptions(attn_dtype="fp8", attn_backend="ours")
        assert run_mm_processor(language, requests(1), options)["completed"] == 1
    finally:
        unregister_impl("attention", "ours")
    assert len(calls) == 2 * 2  # layers, requests with the warm-up


def test_failures_are_counted_and_named(language, monkeypatch):
    good = requests(2)
    generate, calls = mm_processor.generate, []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("out of luck")
        return generate(*args)

    monkeypatch.setattr(mm_processor, "generate", fail_once)
    result = run_mm_processor(language, good, EncoderOptions(), num_warmups=0)
    assert (result["completed"], result["failed"]) == (1, 1)
    assert result["errors"] == ["RuntimeError: out of luck"]
    calls.clear()
    with pytest.raises(RuntimeError, match="out of luck"):
        run_mm_processor(language, good[:1], EncoderOptions(), num_warmups=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_warmups": -1}, "no less than 0 warm-ups"),
        ({"output_len": 0}, "one token"),
        ({"percentiles": []}, "expected percentiles"),
        ({"percentiles": [101]}, "expected percentiles"),
    ],
)
def test_counts_that_are_refused(language, options, message):
    with pytest.raises(ConfigError, match=message):
        run_mm_processor(language, requests(1), EncoderOptions(), **options)
    with pytest.raises(ConfigError, match="at least one request"):
        run_mm_processor(language, [], EncoderOptions())


def test_random_requests_follow_their_seed():
    first, again, other = (requests(4, seed=seed, base_items_per_request=2) for seed in (1, 1, 2))
    assert [r.prompt for r in first] == [r.prompt for r in again] != [r.prompt for r in other]
    assert all(len(r.images) == 2 and len(r.prompt) == 32 for r in first)
    pairs = zip(first, again, strict=True)
    assert all(a.images[0].tobytes() == b.images[0].tobytes() for a, b in pairs)
    assert {image.size for r in first for image in r.images} <= {(64, 64), (96, 64)}


def test_requests_of_a_folder(tmp_path, language):
    for i in range(2):
        Image.new("RGB", (64, 64), (i, 0, 0)).save(tmp_path / f"{i}.png")
    options = {"dataset_name": "hf", "dataset_path": str(tmp_path)}
    found = make_image_prompts(ImageRequests(num_prompts=2, **options))
    assert isinstance(found[1], ImagePrompt) and found[1].images[0].getpixel((0, 0)) == (1, 0, 0)
    assert run_mm_processor(language, found, EncoderOptions())["completed"] == 2
    with pytest.raises(ConfigError, match="expected 3 prompts in .* got 2"):
        make_image_prompts(ImageRequests(num_prompts=3, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"dataset_name": "sharegpt"},
        {"dataset_name": "hf"},
        {"dataset_path": "x"},
        {"num_prompts": 0},
        {"base_items_per_request": 0},
        {"bucket_config": "{(1, 2): 1}"},
        {"bucket_config": "os.remove"},
        {"bucket_config": "{(64, 64, 1): 0}"},
        {"bucket_config": "{(64, 0, 1): 1}"},
    ],
)
def test_data_that_is_refused(options):
    with pytest.raises(ConfigError):
        ImageRequests(**options)


def test_buckets():
    assert parse_buckets("{(8, 9, 1): 1, (8, 9, 16): 0}") == {(8, 9, 1): 1.0}
    with pytest.raises(UnsupportedError, match="got videos"):
        parse_buckets("{(8, 9, 16): 1}")
