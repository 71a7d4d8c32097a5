"""CLIP score: how well a picture fits its prompt, by a CLIP model of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.integrations.transformers.load import load_part, load_weights


@dataclass(frozen=True)
class ClipScorer:
    """A CLIP model with what prepares its inputs, and the name that records call it."""

    model: Any
    image_processor: Any
    tokenizer: Any
    name: str

    @torch.inference_mode()
    def score(self, pictures: Tensor, prompts: Sequence[str]) -> tuple[float, ...]:
        """100 · cosine of each picture [3, height, width] in 0 … 1 and its prompt, at least 0."""
        if len(pictures) != len(prompts) or not len(pictures):
            raise ConfigError(
                f"expected a prompt for each of {len(pictures)} pictures, got {len(prompts)}"
            )
        rounded = (pictures.float() * 255).round().to("cpu", torch.uint8)
        images = self.image_processor(images=list(rounded.numpy()), return_tensors="pt")
        texts = self.tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt")
        device = self.model.device
        seen = self.model.get_image_features(images["pixel_values"].to(device)).pooler_output
        meant = self.model.get_text_features(**texts.to(device)).pooler_output
        cosine = torch.cosine_similarity(seen.double(), meant.double())
        return tuple((100 * cosine).clamp(min=0).tolist())


def load_clip_scorer(folder: str) -> ClipScorer:
    """The CLIP model of a folder or the hub, in float32 on the CPU."""
    from transformers import CLIPModel

    model = load_weights(folder, CLIPModel, dtype="float32", device="cpu")
    expected = "a CLIP model's image processor and tokenizer"
    processor = load_part("AutoImageProcessor", folder, expected)
    return ClipScorer(model, processor, load_part("AutoTokenizer", folder, expected), folder)
