"""Scales of a decoder's layers by the model's names or vLLM's."""

import pytest

from octavo import CheckpointError, LayerScales, ScaleSet
from octavo.calibration.scale_file import ScaleHeader
from octavo.integrations.transformers.decoder_layers import kv_scales, vllm_name

NAMES = [f"model.layers.{index}.self_attn" for index in range(2)]
TEXT_NAMES = [f"model.language_model.layers.{index}.self_attn" for index in range(2)]


def scale_set(names, kind="kv_cache"):
    layers = {name: LayerScales(0.1, 0.2, index + 1.0) for index, name in enumerate(names)}
    return ScaleSet(layers, ScaleHeader(kind=kind))


@pytest.mark.parametrize(
    ("names", "in_file"),
    [
        (NAMES, NAMES),
        (NAMES, [f"{name}.attn" for name in NAMES]),
        (TEXT_NAMES, TEXT_NAMES),
        (TEXT_NAMES, [f"language_model.model.layers.{i}.self_attn.attn" for i in range(2)]),
    ],
)
def test_names_of_the_model_and_of_vllm(names, in_file):
    found = kv_scales(scale_set(in_file), names)
    assert [(name, layer.v) for name, layer in found.items()] == [(names[0], 1.0), (names[1], 2.0)]
    assert vllm_name(TEXT_NAMES[0]) == "language_model.model.layers.0.self_attn.attn"


def test_a_layer_without_scales():
    with pytest.raises(CheckpointError, match=r"expected scales for 'model\.layers\.1\.self_attn'"):
        kv_scales(scale_set(NAMES[:1]), NAMES)


def test_a_file_for_vision_attention():
    with pytest.raises(CheckpointError, match="for kv_cache, got a file for vision_attention"):
        kv_scales(scale_set(NAMES, kind="vision_attention"), NAMES)
    assert kv_scales(scale_set(NAMES, kind=None), NAMES)
