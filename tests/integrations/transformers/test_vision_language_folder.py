"""Vision-language models of a folder, as benchmarks call them."""

import pytest
import torch

from octavo.integrations.transformers.encoder_options import EncoderOptions
from octavo.measure.bench.mm_processor import run_mm_processor
from octavo.measure.bench.requests import ImagePrompt

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from PIL import Image

from octavo.integrations.transformers.vision_language import (
    NamedModel,
    generate,
    open_vision_language,
)
from octavo_testkit.models import vlm_folders


def test_a_models_folder(tmp_path):
    language = open_vision_language(
        str(vlm_folders.write_llava(tmp_path / "llava")), torch.device("cpu")
    )
    assert isinstance(language, NamedModel) and language.name == "llava"
    assert language.model.dtype == torch.bfloat16 and not language.model.training
    images = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
    prepared = language.prepare("What is it?", images)
    ids = prepared.inputs["input_ids"]
    num_image_tokens = int((ids == language.model.config.image_token_index).sum())
    assert num_image_tokens == 2 * vlm_folders.NUM_IMAGE_TOKENS
    text = language.processor.decode(ids[0].tolist(), skip_special_tokens=True)
    assert text == "user: What is it?\nassistant: "
    assert prepared.processor_ms > 0 and prepared.update_prompt_ms == 0
    assert generate(language.model, prepared.inputs, 3) == 3
    options = EncoderOptions(attn_dtype="fp8")
    requests = [ImagePrompt("What?", tuple(images[:1])), ImagePrompt("Both?", tuple(images))]
    result = run_mm_processor(language, requests, options)
    assert (result["completed"], result["config"]["model"]) == (2, "llava")
    assert result["encoder_summary"]["total_encoder_calls"] == 2
