"""CLIP score: how well a picture fits its prompt, by a CLIP model of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.integrations.transformers.load import loading
from octavo.integrations.transformers.load_stored import load_weights


@dataclass(frozen=True)
class ClipScorer:
    """A CLIP model with what prepares its inputs, and the name that records call it."""

    model: Any
    image_processor: Any
    tokenizer: Any
    name: str

    @torch.inference_mode()
    def score(self, pictures: Tensor, prompts: Sequence[str]) -> tuple[float, ...]:
        """100 times the cosine of picture and prompt, at least 0, for each pair.

        pictures: [n, 3, height, width], 0 to 1. Prompts beyond the model's length are cut.
        """
        if len(pictures) != len(prompts) or not len(pictures):
            raise ConfigError(
                f"expected a prompt for each picture, got {len(pictures)} pictures and "
                f"{len(prompts)} prompts"
            )
        rounded = (pictures.float() * 255).round().to("cpu", torch.uint8)
        images = self.image_processor(images=list(rounded.numpy()), return_tensors="pt")
        texts = self.tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt")
        device = self.model.device
        seen = self.model.get_image_features(images["pixel_values"].to(device)).pooler_output
        meant = self.model.get_text_features(**texts.to(device)).pooler_output
        cosine = torch.cosine_similarity(seen.double(), meant.double())
        return tuple((100 * cosine).clamp(min=0).tolist())


def load_clip_scorer(folder: str, device: str = "cpu") -> ClipScorer:
    """The CLIP model in a folder, or of a name that transformers can load, in float32."""
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    model = load_weights(folder, CLIPModel, dtype="float32", device=device)
    with loading(folder, "a CLIP model's image processor and tokenizer"):
        processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return ClipScorer(model, processor, tokenizer, folder)
