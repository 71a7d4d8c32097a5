"""FP8 attention of encoders inside vLLM, with stand-ins for the few things of vLLM that it uses."""

import json
import logging
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch

from octavo.calibration.scale_file import (
    LayerScales,
    ScaleHeader,
    ScaleSet,
    load_scales,
    save_scales,
)
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.layers.scaling import DynamicScaling, StaticScaling
from octavo.ops import check

NAMES = [f"visual.blocks.{index}.attn.attn" for index in range(3)]
HEADS, HEAD_SIZE = 2, 72


class Stock(torch.nn.Module):
    """What the subclass uses of vLLM's MMEncoderAttention."""

    settings = None  # of the engine that is being made

    def __init__(self, num_heads, head_size, scale=None, num_kv_heads=None, prefix=""):
        super().__init__()
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale = head_size**-0.5 if scale is None else scale
        self.layer_name = prefix
        self._init_fp8_state()

    def _init_fp8_state(self):
        self.fp8_enabled = False
        if self.settings is not None and self.settings.mm_encoder_attn_dtype == "fp8":
            raise ValueError("vLLM has no FP8 here")

    def process_weights_after_loading(self, act_dtype):
        self.processed_for = act_dtype

    def forward(self, *arguments):
        return arguments


class Engine:
    """Layers of an engine with such settings, made and loaded as vLLM does it."""

    def __init__(self, vllm, parallel=(1, 1), compilation=(), **settings):
        self.vllm = vllm
        vllm.stock.settings = SimpleNamespace(
            mm_encoder_attn_dtype="fp8",
            mm_encoder_attn_backend=None,
            mm_encoder_fp8_scale_path=None,
            mm_encoder_fp8_scale_save_path=None,
            mm_encoder_fp8_scale_save_margin=1.5,
        )
        vars(vllm.stock.settings).update(settings)
        modes = {"compile_mm_encoder": False, "cudagraph_mm_encoder": False}
        vllm.config = SimpleNamespace(
            compilation_config=SimpleNamespace(**{**modes, **dict.fromkeys(compilation, True)}),
            parallel_config=SimpleNamespace(world_size=parallel[0], data_parallel_size=parallel[1]),
            model_config=SimpleNamespace(model="some/model"),
        )

    def make(self, names=NAMES):
        layer = self.vllm.encoder.OctavoEncoderAttention
        return [layer(HEADS, HEAD_SIZE, prefix=name) for name in names]

    def load(self, names=NAMES):
        layers = self.make(names)
        for layer in layers:
            layer.process_weights_after_loading(torch.bfloat16)
        return layers


@pytest.fixture
def vllm(monkeypatch):
    """The module under test, imported beside stand-ins for vLLM's."""
    found = SimpleNamespace(stock=type("MMEncoderAttention", (Stock,), {}), config=None)
    platform = SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: True, device_type="cpu")
    attributes = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: found.config},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {"MMEncoderAttention": found.stock},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.vision": {
            "get_multimodal_config": lambda: found.stock.settings
        },
        "vllm.platforms": {"current_platform": platform},
    }
    for name, values in attributes.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    name = "octavo.integrations.vllm.encoder"
    monkeypatch.delitem(sys.modules, name, raising=False)
    found.platform, found.encoder = platform, import_module(name)
    yield found
    del sys.modules[name]


def qkv(lengths=(5, 1, 18), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (1, sum(lengths), HEADS, HEAD_SIZE)
    tensors = [torch.randn(shape, generator=generator).bfloat16() for _ in range(3)]
    return tensors, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def run(layers, passes=1, **options):
    for seed in range(passes):
        tensors, cu_seqlens = qkv(seed=seed, **options)
        for layer in layers:
            layer(*tensors, cu_seqlens=cu_seqlens, max_seqlen=torch.tensor(18))


def test_without_fp8_everything_is_vllms(vllm):
    layers = Engine(vllm, mm_encoder_attn_dtype=None).load()
    assert all(layer.octavo is None and layer.fp8_enabled is False for layer in layers)
    assert all(layer.processed_for is torch.bfloat16 for layer in layers)
    assert layers[0](1, 2, 3, cu_seqlens=4, max_seqlen=5) == (1, 2, 3, 4, 5, None)


def test_a_model_without_images_is_vllms(vllm):
    engine = Engine(vllm)
    vllm.stock.settings = None
    assert [layer.octavo for layer in engine.load()] == [None] * 3


@pytest.mark.parametrize("backend", ["FLASHINFER", "TRITON_ATTN"])
def test_a_backend_that_was_asked_for_is_vllms(vllm, backend):
    with pytest.raises(ValueError, match="vLLM has no FP8 here"):
        Engine(vllm, mm_encoder_attn_backend=backend).make()


def test_other_platforms_are_vllms(vllm):
    vllm.platform.is_cpu = lambda: False
    with pytest.raises(ValueError, match="vLLM has no FP8 here"):
        Engine(vllm).make()


def test_layers_are_counted_once_and_those_of_a_failed_load_are_not(vllm, caplog):
    Engine(vllm).make()  # and then an error
    with caplog.at_level(logging.INFO):
        layers = Engine(vllm).load()
    line = "octavo runs attention in FP8 in 3 layers of the vision encoder, with dynamic scales"
    assert caplog.messages == [line]
    before = [layer.octavo for layer in layers]
    run(layers)
    for layer in layers:  # weights were loaded anew
        layer.process_weights_after_loading(torch.bfloat16)
    assert [layer.octavo for layer in layers] == before
    assert int(before[0].scaling.num_passes) == 1


def test_saved_scales_are_those_of_sixteen_passes_and_are_loaded(vllm, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "scales.json"
    save = {"mm_encoder_fp8_scale_save_path": str(path), "mm_encoder_fp8_scale_save_margin": 2.0}
    layers = Engine(vllm, **save).load()
    run(layers, 15)
    run(layers[:2])
    assert not path.exists()
    run(layers[2:])
    assert caplog.messages[1:] == [f"octavo has saved the encoder's scales to {path}"]
    found = load_scales(path, strict=True)
    assert found.header.kind == "vision_attention"
    assert (found.header.margin, found.header.passes, found.header.model) == (2, 16, "some/model")
    for layer in layers:
        scales = layer.octavo.scaling.scales(2.0)
        entry = found.layers[layer.layer_name]
        assert (entry.q, entry.k, entry.v) == tuple(map(float, (scales.q, scales.k, scales.v)))
    written = path.read_bytes()
    run(layers, 20)  # more passes change no file
    assert path.read_bytes() == written
    for layer in Engine(vllm, mm_encoder_fp8_scale_path=str(path)).load():
        assert isinstance(layer.octavo.scaling, StaticScaling)
        assert float(layer.octavo.scaling.q) == pytest.approx(found.layers[layer.layer_name].q)
    assert caplog.messages[2].endswith(f"of the vision encoder, with static scales from {path}")


def test_layers_without_passes_are_named_once(vllm, tmp_path, caplog):
    """Such as those of an audio encoder, in a run without sound."""
    path = tmp_path / "scales.json"
    layers = Engine(vllm, mm_encoder_fp8_scale_save_path=str(path)).load()
    run(layers[:2], 95, lengths=(2,))
    assert not caplog.messages
    run(layers[:2], 5, lengths=(2,))
    (warning,) = caplog.messages
    assert "expected 16 passes of every layer, got 'visual.blocks.2.attn.attn (0 pass" in warning
    run(layers[2:], 16, lengths=(2,))
    run(layers[:2], 16, lengths=(2,))
    assert path.exists()


def write(path, layers, header=None):
    scales = {name: LayerScales(q=0.01, k=0.02, v=0.03) for name in layers}
    save_scales(path, ScaleSet(scales, header or ScaleHeader()))


def test_a_file_in_vllms_form_is_loaded(vllm, tmp_path):
    path = tmp_path / "scales.json"
    path.write_text(json.dumps({name: {"q_scale": 0.5, "k": 0.25, "v": 1.0} for name in NAMES}))
    for layer in Engine(vllm, mm_encoder_fp8_scale_path=str(path)).load():
        scaling = layer.octavo.scaling
        assert [float(x) for x in (scaling.q, scaling.k, scaling.v)] == [0.5, 0.25, 1.0]


def test_a_file_that_does_not_fit_is_refused(vllm, tmp_path):
    path = tmp_path / "scales.json"
    engine = Engine(vllm, mm_encoder_fp8_scale_path=str(path))
    write(path, NAMES[:2])
    with pytest.raises(CheckpointError, match="expected scales for 'visual.blocks.2.attn.attn'"):
        engine.load()
    write(path, NAMES, ScaleHeader(kind="kv_cache"))
    with pytest.raises(CheckpointError, match="expected scales for vision_attention, got a file"):
        engine.load()
    for wrong, error in (
        ({"q": 0.0, "k": 1.0, "v": 1.0}, "expected q to be a positive finite number"),
        ({"q": 1.0, "k": -1.0, "v": 1.0}, "expected k to be a positive finite number"),
    ):
        path.write_text(json.dumps({name: wrong for name in NAMES}))
        with pytest.raises(CheckpointError, match=error):
            engine.load()
    path.write_text(json.dumps({"layers": {name: {"q": None, "k": 1, "v": 1} for name in NAMES}}))
    with pytest.raises(ConfigError, match="got none for q"):
        engine.load()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compilation": ["compile_mm_encoder"]}, "does not support compile_mm_encoder"),
        (
            {"mm_encoder_fp8_scale_save_path": "x", "compilation": ["cudagraph_mm_encoder"]},
            "does not support cudagraph_mm_encoder, whose replays cannot be counted",
        ),
        ({"mm_encoder_fp8_scale_save_path": "x", "parallel": (2, 1)}, "one process.* got 2"),
        ({"mm_encoder_fp8_scale_save_path": "x", "parallel": (1, 3)}, "one process.* got 3"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_loaded(vllm, options, reason):
    with pytest.raises(UnsupportedError, match=reason):
        Engine(vllm, **options).make()


def test_scales_of_unnamed_layers_are_not_saved(vllm, tmp_path):
    engine = Engine(vllm, mm_encoder_fp8_scale_save_path=str(tmp_path / "x.json"))
    for names in (["", ""], ["a", "a"], [""]):
        with pytest.raises(UnsupportedError, match="no names of their own"):
            engine.load(names)


def test_graphs_and_more_processes_are_no_matter_without_saving(vllm):
    layers = Engine(vllm, parallel=(4, 2), compilation=["cudagraph_mm_encoder"]).load()
    assert all(isinstance(layer.octavo.scaling, DynamicScaling) for layer in layers)


def test_a_gpu_without_fp8_is_refused(vllm, monkeypatch):
    device = SimpleNamespace(type="cuda", capability=(8, 0), name="NVIDIA A100")
    monkeypatch.setattr(check, "describe", lambda _: device)
    vllm.platform.is_cuda, vllm.platform.device_type = (lambda: True), "cuda"
    with pytest.raises(
        UnsupportedError, match=r"blocks.0.*sm_89 or newer.*leave --mm-encoder-attn"
    ):
        Engine(vllm).make()


def test_amax_is_that_of_absolute_values(vllm):
    """vLLM's own dynamic scales miss large negative values (`tensor.amax()`)."""
    (layer,) = Engine(vllm).load(NAMES[:1])
    (q, k, v), cu_seqlens = qkv()
    k[0, 3, 1, 7] = -40
    layer(q, k, v, cu_seqlens=cu_seqlens)
    assert float(layer.octavo.scaling.scales().k) == pytest.approx(40 / 448)


@pytest.mark.parametrize("longest", [None, 0, 18, torch.tensor(0), torch.tensor(18)])
def test_lengths_need_no_bound(vllm, longest):
    """Some of vLLM's backends give none, or 0."""
    (layer,) = Engine(vllm).load(NAMES[:1])
    tensors, cu_seqlens = qkv()
    found = layer(*tensors, cu_seqlens=cu_seqlens.long(), max_seqlen=longest)
    expected = layer(*tensors, cu_seqlens=cu_seqlens, max_seqlen=24)
    assert torch.equal(found, expected)


def test_sequences_of_a_batch_may_be_packed_or_not(vllm):
    """Two rows of 12 tokens: as they are, or as packed sequences of the whole batch."""
    (layer,) = Engine(vllm).load(NAMES[:1])
    tensors, _ = qkv((24,))
    rows = [x.reshape(2, 12, HEADS, HEAD_SIZE) for x in tensors]
    expected = layer(*rows)
    assert expected.shape == rows[0].shape
    packed = layer(*rows, cu_seqlens=torch.tensor([0, 12, 24]), max_seqlen=12)
    assert torch.equal(packed, expected)
    joint = layer(*(x.flatten(2) for x in rows), cu_seqlens=torch.tensor([0, 12, 24]))
    assert torch.equal(joint, expected.flatten(2))


def test_padding_behind_the_last_sequence_is_not_looked_at(vllm):
    """A replayed CUDA graph has some; cu_seqlens end with empty sequences then."""
    plain, padded = Engine(vllm).load(NAMES[:2])
    tensors, cu_seqlens = qkv()
    expected = plain(*tensors, cu_seqlens=cu_seqlens, max_seqlen=18)
    more = [torch.cat([x, x.new_full((1, 7, HEADS, HEAD_SIZE), 100.0)], 1) for x in tensors]
    ends = torch.cat([cu_seqlens, cu_seqlens[-1:].expand(3)])
    output = padded(*more, cu_seqlens=ends, max_seqlen=18)
    assert torch.equal(output[:, : expected.shape[1]], expected)
    assert torch.equal(padded.octavo.scaling.scales().q, plain.octavo.scaling.scales().q)


def test_dynamic_scales_wait_for_no_device(vllm):
    """Tensors without data: reading one on the host is an error, as in a CUDA graph's capture."""
    vllm.platform.device_type = "meta"
    (layer,) = Engine(vllm).load(NAMES[:1])
    tensors, cu_seqlens = qkv()
    meta, cu_seqlens = [x.to("meta") for x in tensors], cu_seqlens.to("meta")
    output = layer(*meta, cu_seqlens=cu_seqlens, max_seqlen=torch.tensor(18))
    assert output.device.type == "meta"
    assert output.shape == tensors[0].shape
    with pytest.raises(RuntimeError, match="meta tensors"):  # were a bound read from the device
        layer(*meta, cu_seqlens=cu_seqlens, max_seqlen=torch.tensor(18, device="meta"))
