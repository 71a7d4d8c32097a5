"""Damaged weight files: which file, what is wrong with it and what to do, through every loader."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.tensor_files import find_damage

GOLDEN = Path(__file__).parents[2] / "golden" / "ead51fe" / "checkpoints"
PLAIN, SINGLE = "model-00001-of-00001.safetensors", "model.safetensors"
AGAIN = "; download or copy it again"
DAMAGES = {
    "cut off": (lambda content: content[:-100], "goes beyond the end of the file, which has"),
    "cut off in its header": (lambda content: content[:50], "expected a safetensors file, got one"),
    "too long": (lambda content: content + b"x", "bytes by its header, got"),
    "empty": (lambda content: b"", "the file is empty"),
    "zeros": (lambda content: bytes(len(content)), "expected a safetensors header"),
    "a page": (lambda content: b"<html>404</html>" * 9, "got one that begins with b'<html>40'"),
    "a pointer": (lambda content: b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
}


@pytest.fixture(params=DAMAGES)
def damage(request):
    return DAMAGES[request.param]


def plain_folder(tmp_path):
    """A tiny model in float32 with an index that names its files."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "export-modelopt", folder)
    (folder / "hf_quant_config.json").unlink()
    return folder


def fp8_folder(tmp_path):
    return Path(shutil.copytree(GOLDEN / "llama-channel", tmp_path / "model"))


def hurt(path, damage):
    change, said = damage
    path.write_bytes(change(path.read_bytes()))
    return f"{path} is damaged: .*{said}.*{AGAIN}"


def test_folders_that_are_whole():
    for folder in [GOLDEN, *GOLDEN.iterdir()]:
        assert find_damage(folder) is None


def test_it_is_found(damage, tmp_path):
    folder = plain_folder(tmp_path)
    said = hurt(folder / PLAIN, damage)
    with pytest.raises(CheckpointError, match=said):
        raise CheckpointError(find_damage(folder))
    assert find_damage(folder / PLAIN) == find_damage(folder) == find_damage(tmp_path)


def test_a_text_model(damage, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from octavo.integrations.transformers import text_model

    monkeypatch.setattr(text_model, "load_tokenizer", lambda name: None)
    folder = plain_folder(tmp_path)
    said = hurt(folder / PLAIN, damage)
    with pytest.raises(CheckpointError, match=said):
        text_model.load_text_model(str(folder), device="cpu")


def test_an_fp8_checkpoint(damage, tmp_path):
    transformers = pytest.importorskip("transformers")
    from octavo import load_fp8

    folder = fp8_folder(tmp_path)
    said = hurt(folder / SINGLE, damage)
    with pytest.raises(CheckpointError, match=said):
        load_fp8(transformers.AutoModelForCausalLM, folder)


def test_a_model_that_is_quantized_as_it_loads(tmp_path):
    transformers = pytest.importorskip("transformers")
    from octavo import OctavoConfig

    for name in ("cut off", "empty", "zeros", "a page"):
        folder = plain_folder(tmp_path / name)
        said = hurt(folder / PLAIN, DAMAGES[name])
        with pytest.raises(CheckpointError, match=said):
            transformers.AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=OctavoConfig()
            )


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_shard_that_is_missing(is_fp8, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from octavo import load_fp8
    from octavo.integrations.transformers import text_model

    monkeypatch.setattr(text_model, "load_tokenizer", lambda name: None)
    folder = (fp8_folder if is_fp8 else plain_folder)(tmp_path)
    if is_fp8:
        (folder / SINGLE).rename(folder / PLAIN)
        weights = {"weight_map": {"model.norm.weight": PLAIN}}
        (folder / f"{SINGLE}.index.json").write_text(json.dumps(weights))
    (folder / PLAIN).unlink()
    said = f"index.json names weight files that are missing: '{PLAIN}'; download or copy them again"
    with pytest.raises(CheckpointError, match=said):
        if is_fp8:
            load_fp8(transformers.AutoModelForCausalLM, folder)
        else:
            text_model.load_text_model(str(folder), device="cpu")


def test_a_component_of_a_pipeline(damage, tmp_path):
    diffusers = pytest.importorskip("diffusers")
    from octavo.integrations.diffusers.load import load_pipeline

    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(4, 4),
        norm_num_groups=1,
        layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
        add_attention=False,
    )
    pipe = diffusers.DDPMPipeline(unet=unet, scheduler=diffusers.DDPMScheduler())
    pipe.save_pretrained(tmp_path)
    said = hurt(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", damage)
    with pytest.raises(CheckpointError, match=said):
        load_pipeline(tmp_path, device="cpu")


def gguf_file(path):
    gguf = pytest.importorskip("gguf")
    import numpy as np

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("a", np.ones((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kept", [100, 10_000, 20, 4])
def test_a_gguf_file_that_is_cut_off(kept, tmp_path):
    path = gguf_file(tmp_path / "model.gguf")
    assert find_damage(path) is None and find_damage(tmp_path) is None
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} is damaged: its content ends too early" in find_damage(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGML" * 50, struct.pack("<Q", 2) * 9])
def test_what_is_no_gguf_file(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert "expected a GGUF file, got one that begins with" in find_damage(path)


def test_the_gguf_model_is_loaded_with_the_same_errors(tmp_path):
    pytest.importorskip("transformers")
    from octavo.integrations.transformers.load import loading

    path = gguf_file(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:1000])
    with (
        pytest.raises(CheckpointError, match="model.gguf is damaged: its content ends too early"),
        loading(path, "a GGUF file"),
    ):
        raise ValueError("cannot reshape array")
