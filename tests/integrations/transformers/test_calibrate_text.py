"""Calibrating the KV cache of language models: exact, without padding, resumed, refused."""

import json
import math

import pytest
import torch

from octavo import (
    CalibrationSettings,
    CheckpointError,
    ConfigError,
    UnsupportedError,
    calibrate_kv,
    load_scales,
)
from octavo.calibration.data import open_texts
from octavo.calibration.run import Calibration, calibrate_to_file
from octavo.calibration.state import state_path
from octavo.numerics.formats import E4M3

pytest.importorskip("transformers")

import transformers

from octavo.integrations.transformers import calibrate as calibrate_module
from octavo.integrations.transformers import text_model as text_model_module
from octavo.integrations.transformers.calibrate import observe_text
from octavo.integrations.transformers.text import find_layers
from octavo.integrations.transformers.text_model import TextModel, load_text_model, run_windows
from octavo_testkit.models import text_models

EXACT = CalibrationSettings(margin=1.0)


def make_model(family="llama"):
    """A decoder that has the tokenizer's tokens."""
    sizes = {"vocab_size": text_models.NUM_TOKENS, "max_position_embeddings": 256}
    return text_models.make_decoder(family, **sizes)


def text_model(family="llama", **tokenizer):
    model = make_model(family)
    return TextModel("tiny", model, text_models.make_tokenizer(**tokenizer))


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(text_models.SENTENCES * 4))
    return open_texts(str(tmp_path / "a.txt"))


def stock_amax(model, windows, *, is_per_head):
    """The largest keys and values of each layer in stock caches, one for each window."""
    found = {}
    for window in windows:
        cache = transformers.DynamicCache()
        with torch.inference_mode():
            model(input_ids=torch.tensor([window]), past_key_values=cache, use_cache=True)
        for name, module in find_layers(model).items():
            layer = cache.layers[module.layer_idx]
            for tensor, x in (("k", layer.keys), ("v", layer.values)):
                amax = x.abs().amax(dim=(0, 2, 3) if is_per_head else (0, 1, 2, 3)).reshape(-1)
                before = found.get((name, tensor), torch.zeros_like(amax))
                found[name, tensor] = torch.maximum(before, amax)
    return found


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("family", [*text_models.FAMILIES, text_models.VISION_LANGUAGE])
def test_amax_is_that_of_stock_caches(tmp_path, texts, family, granularity):
    subject = text_model(family)
    data = subject.cut_windows(texts, 24)
    settings = CalibrationSettings(margin=1.0, granularity=granularity)
    path = tmp_path / "s.json"
    result = calibrate_to_file(subject.subject(), data, path, settings, num_prompts=5)
    expected = stock_amax(subject.model, data.prompts(5), is_per_head=granularity == "head")
    assert list(result.scales.layers) == list(find_layers(subject.model))
    for (name, tensor), amax in expected.items():
        scale = getattr(load_scales(path).layer(name), tensor)
        found = torch.tensor(scale, dtype=torch.float32).reshape(-1)
        torch.testing.assert_close(found, amax / E4M3.max, rtol=1e-6, atol=0)
    q = result.scales.layer(next(iter(result.scales.layers))).q
    assert isinstance(q, float) if granularity == "tensor" else len(q) == 4
    header = load_scales(path).header
    assert (header.kind, header.model, header.passes, header.margin) == ("kv_cache", "tiny", 5, 1)


def num_values(model, batches):
    """How many values of the first layer's k were counted."""
    calibration = Calibration(list(find_layers(model)), EXACT)
    with observe_text(model, calibration.see), torch.inference_mode():
        for batch in batches:
            calibrate_module.run_inputs(model, batch)
    return int(next(iter(calibration.layers.values())).parts["k"].counts.sum())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_seen(side):
    """The padding's planted embedding would give the largest key: it points along a weight."""
    model = make_model()
    rows = [torch.randint(2, 300, (length,)).tolist() for length in (12, 7, 12)]
    alone = calibrate_kv(model, [{"input_ids": torch.tensor([row])} for row in rows], EXACT)
    with torch.no_grad():
        weight = model.model.layers[0].self_attn.k_proj.weight
        model.model.embed_tokens.weight[0] = weight[0]
    tokenizer = text_models.make_tokenizer()
    tokenizer.padding_side = side
    batch = dict(tokenizer.pad({"input_ids": rows}, return_tensors="pt"))
    assert batch["attention_mask"].sum() == 31 and batch["input_ids"].shape == (3, 12)
    assert calibrate_kv(model, [batch], EXACT).layers == alone.layers
    assert num_values(model, [batch]) == 31 * 2 * 16
    unmasked = calibrate_kv(model, [{"input_ids": batch["input_ids"]}], EXACT)
    first = "model.layers.0.self_attn"
    assert unmasked.layer(first).k > 1.2 * alone.layer(first).k  # so the test could fail


def test_padding_beside_other_inputs_is_refused():
    inputs = {
        "input_ids": torch.ones(1, 4, dtype=torch.long),
        "position_ids": torch.arange(4)[None],
        "attention_mask": torch.tensor([[0, 1, 1, 1]]),
    }
    model = make_model()
    with pytest.raises(UnsupportedError, match="without padding beside position_ids"):
        calibrate_kv(model, [inputs])
    inputs["attention_mask"] = torch.ones(1, 4)
    expected = calibrate_kv(model, [{"input_ids": inputs["input_ids"]}])
    assert calibrate_kv(model, [inputs]).layers == expected.layers


@pytest.mark.parametrize("inputs", [{}, {"input_ids": [1]}, {"input_ids": torch.ones(4)}])
def test_batches_that_are_none(inputs):
    with pytest.raises(ConfigError, match="expected batches with input_ids"):
        calibrate_kv(make_model(), [inputs])


def test_the_batch_size_changes_no_scale(tmp_path, texts):
    subject = text_model()
    data = subject.cut_windows(texts, 24)
    one = calibrate_to_file(subject.subject(), data, tmp_path / "a.json", EXACT)
    many = calibrate_to_file(subject.subject(), data, tmp_path / "b.json", EXACT, batch_size=4)
    assert one.num_prompts == many.num_prompts > 4
    for name, layer in one.scales.layers.items():
        assert many.scales.layer(name).k == pytest.approx(layer.k, rel=1e-5)


@pytest.mark.gpu
def test_scales_on_a_gpu(tmp_path, texts):
    on_cpu, on_gpu = text_model(), text_model()
    on_gpu.model.to("cuda")
    expected, found = (
        calibrate_to_file(m.subject(), m.cut_windows(texts, 24), tmp_path / "s.json", EXACT).scales
        for m in (on_cpu, on_gpu)
    )
    for name, layer in expected.layers.items():
        assert found.layer(name).k == pytest.approx(layer.k, rel=1e-3)
        assert found.layer(name).v == pytest.approx(layer.v, rel=1e-3)


def test_resuming_after_an_interrupt(tmp_path, texts, monkeypatch):
    settings = CalibrationSettings(observer="percentile", percentile=99, granularity="head")
    subject = text_model("gemma3_text")
    data = subject.cut_windows(texts, 24)
    whole = calibrate_to_file(subject.subject(), data, tmp_path / "a.json", settings, num_prompts=8)
    path, num_calls = tmp_path / "b.json", 0

    def fail_at_the_sixth(model, windows):
        nonlocal num_calls
        num_calls += 1
        run_windows(model, windows)
        if num_calls == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(text_model_module, "run_windows", fail_at_the_sixth)
        with pytest.raises(KeyboardInterrupt):
            calibrate_to_file(subject.subject(), data, path, settings, num_prompts=8, save_every=2)
    assert state_path(path).exists() and not path.exists()
    other = subject.cut_windows(texts, 25)
    with pytest.raises(ConfigError, match="another calibration: expected data .* windows of 25"):
        calibrate_to_file(subject.subject(), other, path, settings, num_prompts=8)
    seen = []
    resumed = calibrate_to_file(
        subject.subject(), data, path, settings, num_prompts=8, on_prompts=seen.append
    )
    assert seen == [4, 5, 6, 7, 8]
    assert resumed.statistics == whole.statistics
    assert load_scales(path).layers == load_scales(tmp_path / "a.json").layers
    assert not state_path(path).exists()


def test_zeros_are_refused(tmp_path, texts):
    subject = text_model()
    with torch.no_grad():
        subject.model.model.layers[1].self_attn.v_proj.weight[16:] = 0  # the second head
    data, path = subject.cut_windows(texts, 24), tmp_path / "s.json"
    calibrate_to_file(subject.subject(), data, tmp_path / "tensor.json", EXACT)
    per_head = CalibrationSettings(granularity="head")
    message = r"layer model\.layers\.1\.self_attn: v: .* only zeros in heads '1'"
    with pytest.raises(ConfigError, match=message):
        calibrate_to_file(subject.subject(), data, path, per_head)
    assert not path.exists()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_named(tmp_path, texts, bad):
    """In the layer they come from, though all later layers have them, too."""
    subject = text_model()
    with torch.no_grad():
        subject.model.model.layers[1].self_attn.v_proj.weight[3, 5] = bad
    path = tmp_path / "s.json"
    message = r"layer model\.layers\.1\.self_attn: v: expected finite values, got \d+ that are NaN"
    with pytest.raises(ConfigError, match=message):
        calibrate_to_file(subject.subject(), subject.cut_windows(texts, 24), path, EXACT)
    assert not path.exists()


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    subject = text_model()
    data = subject.cut_windows(open_texts(str(tmp_path / "a.txt")))
    with pytest.raises(ConfigError, match="expected prompts to calibrate on, got none"):
        calibrate_to_file(subject.subject(), data, tmp_path / "s.json", EXACT)


def test_windows_fit_the_context(texts):
    subject = text_model()
    assert "windows of 256" in subject.cut_windows(texts).fingerprint  # less than 2048
    assert "windows of 100" in subject.cut_windows(texts, 100).fingerprint
    with pytest.raises(ConfigError, match="expected max_length up to 256, the context of tiny"):
        subject.cut_windows(texts, 257)


def test_chats_and_texts_give_other_scales(tmp_path, texts):
    rows = [[{"role": "user", "content": sentence}] for sentence in text_models.SENTENCES]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    subject = text_model()
    chats = subject.cut_windows(open_texts(str(tmp_path / "chats.jsonl")))
    found = calibrate_to_file(subject.subject(), chats, tmp_path / "s.json", EXACT)
    assert found.num_prompts == 3
    expected = stock_amax(subject.model, chats.prompts(3), is_per_head=False)
    for (name, tensor), amax in expected.items():
        scale = getattr(found.scales.layer(name), tensor)
        assert scale == pytest.approx(float(amax) / E4M3.max, rel=1e-6)


def test_the_tokenizer_of_another_model(tmp_path, texts):
    subject = text_model()
    subject.model.resize_token_embeddings(50)
    with pytest.raises(CheckpointError, match="expected tokens below 50, .* another model's"):
        calibrate_to_file(
            subject.subject(), subject.cut_windows(texts, 24), tmp_path / "s.json", EXACT
        )


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_loading(tmp_path, texts, family):
    folder = text_models.save_decoder(tmp_path / "model", make_model(family))
    loaded = load_text_model(str(folder), dtype="bfloat16", device="cpu")
    assert next(loaded.model.parameters()).dtype == torch.bfloat16
    names = list(find_layers(make_model(family)))
    assert list(loaded.subject().layers) == names
    path = tmp_path / "s.json"
    calibrate_to_file(loaded.subject(), loaded.cut_windows(texts, 24), path, EXACT)
    assert list(load_scales(path).layers) == names


def test_a_folder_without_a_tokenizer(tmp_path):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="expected a tokenizer beside the model"):
        load_text_model(str(tmp_path))


def test_weights_that_are_missing(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = text_models.save_decoder(tmp_path / "model", make_model())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"got none for 'model\.layers\.1\.self_attn\.k_pr"):
        load_text_model(str(folder))


def test_means_are_those_of_stock_caches():
    model = make_model("llama")
    windows = [torch.arange(2, 20), torch.arange(5, 35)]
    settings = CalibrationSettings(center_keys=True)
    scales = calibrate_kv(model, [{"input_ids": window[None]} for window in windows], settings)
    keys = []
    for window in windows:
        cache = transformers.DynamicCache()
        with torch.inference_mode():
            model(input_ids=window[None], past_key_values=cache, use_cache=True)
        keys.append([layer.keys[0].double() for layer in cache.layers])
    for index, layer in enumerate(scales.layers.values()):
        expected = torch.cat([k[index] for k in keys], 1).mean(1)
        torch.testing.assert_close(torch.tensor(layer.k_mean), expected.float())
        left = max(float((k[index] - expected[:, None]).abs().max()) for k in keys)
        assert layer.k == pytest.approx(1.5 * left / E4M3.max, rel=1e-5)


def test_batches_that_can_be_read_once_are_not_enough_for_means():
    batches = iter([{"input_ids": torch.arange(2, 20)[None]}])
    with pytest.raises(ConfigError, match="center_keys needs two passes: expected a list"):
        calibrate_kv(make_model(), batches, CalibrationSettings(center_keys=True))
