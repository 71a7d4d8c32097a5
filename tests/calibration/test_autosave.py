"""Scales of a dynamic run: saved when every layer is ready, and not before."""

import pytest
import torch
from torch import nn

from octavo import ConfigError, UnsupportedError, load_scales
from octavo.calibration.autosave import ScaleSaver, check_scale_paths
from octavo.calibration.scale_file import ScaleHeader
from octavo.layers.encoder_attention import EncoderAttention
from octavo.numerics.amax import HISTORY_LENGTH
from octavo.numerics.qkv import QkvScales
from octavo.recipe import AttentionSettings

HEADS, HEAD_DIM = 2, 16


class Tower(nn.Module):
    """Attention layers side by side; `skipped` ones are not called."""

    def __init__(self, num_layers=2, **settings):
        super().__init__()
        self.blocks = nn.ModuleList()
        for index in range(num_layers):
            name = f"model.blocks.{index}.attn"
            fp8 = AttentionSettings(**settings)
            block = nn.Module()
            block.attn = EncoderAttention(HEADS, HEAD_DIM, name=name, fp8=fp8)
            self.blocks.append(block)

    def forward(self, x, skipped=()):
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                block.attn(x, 2 * x, 3 * x)


def passes(num_passes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 5, HEADS, HEAD_DIM, generator=generator) for _ in range(num_passes)]


def rename(name):
    return name.removeprefix("model.")


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_saved_at_the_sixteenth_pass_times_margin(tmp_path, granularity):
    tower, path = Tower(granularity=granularity), tmp_path / "s.json"
    header = ScaleHeader(model="m")
    saver = ScaleSaver(tower, path, margin=2.0, rename=rename, header=header).watch()
    xs = passes(HISTORY_LENGTH)
    for x in xs[:-1]:
        tower(x)
    assert not path.exists() and not saver.is_saved
    tower(xs[-1])
    assert saver.is_saved
    found = load_scales(path)
    assert list(found.layers) == ["blocks.0.attn", "blocks.1.attn"]
    dims = (0, 1, 2, 4) if granularity == "head" else (0, 1, 2, 3, 4)
    amax = torch.stack(xs).abs().amax(dim=dims)
    expected = (2.0 * amax / 448).tolist()
    expected = tuple(expected) if granularity == "head" else expected
    assert found.layer("blocks.0.attn").q == pytest.approx(expected)
    assert (found.header.model, found.header.margin, found.header.passes) == ("m", 2.0, 16)


def test_saved_once_and_the_hook_is_gone(tmp_path):
    tower, path = Tower(), tmp_path / "s.json"
    saver = ScaleSaver(tower, path).watch()
    for x in passes(HISTORY_LENGTH):
        tower(x)
    path.unlink()
    for x in passes(2 * HISTORY_LENGTH):
        tower(x)
    saver.step()
    saver.close()
    assert not path.exists()
    assert not tower._forward_hooks


def test_it_waits_for_the_slowest_layer(tmp_path):
    """A layer that ran 15 times blocks the file; vLLM would have written it."""
    tower, path = Tower(), tmp_path / "s.json"
    saver = ScaleSaver(tower, path, rename=rename).watch()
    tower(passes(1)[0], skipped=(1,))
    for x in passes(HISTORY_LENGTH - 1):
        tower(x)
    assert tower.blocks[0].attn.scaling.num_passes == HISTORY_LENGTH
    assert tower.blocks[1].attn.scaling.num_passes == HISTORY_LENGTH - 1
    assert not path.exists()
    with pytest.raises(ConfigError, match=r"got 'blocks\.1\.attn \(15 passes\)'; run more"):
        saver.close()
    assert not path.exists()
    saver.watch()
    for x in passes(HISTORY_LENGTH):
        tower(x)
    assert path.exists()


def test_close_looks_a_last_time(tmp_path):
    tower, path = Tower(), tmp_path / "s.json"
    for x in passes(3):
        tower(x)
    saver = ScaleSaver(tower, path).watch()
    for x in passes(HISTORY_LENGTH - 3):
        tower(x)
    assert not path.exists()  # the saver has counted 13
    saver.close()
    assert path.exists()


def test_the_device_is_asked_once_in_sixteen_passes(tmp_path, monkeypatch):
    tower = Tower()
    saver = ScaleSaver(tower, tmp_path / "s.json").watch()
    asked = []
    monkeypatch.setattr(saver, "_not_ready", lambda: asked.append(1) or ["not yet"])
    for x in passes(3 * HISTORY_LENGTH + 5):
        tower(x)
    assert len(asked) == 3


def test_zeros_are_never_saved(tmp_path):
    tower, path = Tower(), tmp_path / "s.json"
    saver = ScaleSaver(tower, path).watch()
    for _ in range(HISTORY_LENGTH):
        tower(torch.zeros(1, 5, HEADS, HEAD_DIM))
    assert not path.exists()
    with pytest.raises(ConfigError, match="only zeros in q"):
        saver.close()


def test_steps_without_watching(tmp_path):
    """What a runner of CUDA graphs does: replays count on the device, steps on the host."""
    tower, path = Tower(num_layers=1), tmp_path / "s.json"
    saver = ScaleSaver(tower, path)
    for x in passes(HISTORY_LENGTH):
        tower(x)
    assert not path.exists()
    for _ in range(HISTORY_LENGTH):
        saver.step()
    assert path.exists()


def test_layers_left_in_the_models_dtype_are_left_out(tmp_path):
    tower, path = Tower(), tmp_path / "s.json"
    tower.blocks[0].attn = EncoderAttention(HEADS, HEAD_DIM, name="model.blocks.0.attn")
    ScaleSaver(tower, path).watch()
    for x in passes(HISTORY_LENGTH):
        tower(x)
    assert list(load_scales(path).layers) == ["model.blocks.1.attn"]


def test_a_model_without_dynamic_scales(tmp_path):
    with pytest.raises(ConfigError, match="attention in fp8 whose scales can be saved"):
        ScaleSaver(nn.Linear(2, 2), tmp_path / "s.json")
    fp8 = AttentionSettings(scaling="static")
    static = EncoderAttention(HEADS, HEAD_DIM, fp8=fp8, scales=QkvScales.ones(), name="a")
    with pytest.raises(ConfigError, match="expected dynamic scales, .* got static ones"):
        ScaleSaver(nn.ModuleList([static]), tmp_path / "s.json")


def test_heads_on_several_ranks(tmp_path):
    tower = Tower(granularity="head")
    tower.blocks[0].attn.scaling.group = object()
    with pytest.raises(UnsupportedError, match="its heads lie on several ranks"):
        ScaleSaver(tower, tmp_path / "s.json")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"scale_path": "a.json", "save_path": "b.json"}, "to load or to save, got both"),
        ({"is_fp8": False, "save_path": "s.json"}, "expected attention in fp8 for scales at s"),
        ({"is_fp8": False, "scale_path": "s.json"}, "expected attention in fp8 for scales at s"),
        ({"save_path": "gone/s.json"}, "expected an existing folder for gone/s.json"),
        ({"save_path": "."}, r"expected the path of a file, got the folder \."),
        ({"scale_path": "gone.json"}, "expected a scale file, got none at gone.json"),
        ({"save_path": "s.json", "margin": 0.0}, "margin must be a positive"),
        ({"save_path": "s.json", "margin": -1.5}, "margin must be a positive"),
    ],
)
def test_requests_that_contradict_themselves(tmp_path, monkeypatch, request_, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_scale_paths(**{"is_fp8": True, **request_})


def test_requests_that_do_not(tmp_path):
    check_scale_paths(is_fp8=False)
    check_scale_paths(is_fp8=True, save_path=tmp_path / "s.json")
    (tmp_path / "s.json").touch()
    check_scale_paths(is_fp8=True, scale_path=tmp_path / "s.json")


@pytest.mark.gpu
def test_passes_in_a_cuda_graph_count(tmp_path):
    tower, path = Tower().cuda(), tmp_path / "s.json"
    x = passes(1)[0].cuda().bfloat16()
    saver = ScaleSaver(tower, path)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tower(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tower(x)
        saver.step()
    for _ in range(HISTORY_LENGTH):
        graph.replay()
        saver.step()
    assert path.exists()
