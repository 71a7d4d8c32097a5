"""Draw the same image with a diffusers pipeline, unquantized and in FP8, and compare the two."""

import torch

import octavo
from octavo.integrations.diffusers.load import load_pipeline
from octavo.measure.evaluate.image_scores import compare_images

# The small model that comes with octavo; a large one: diffusers' own from_pretrained.
pipe = load_pipeline("small-image", dtype=torch.float32, device="cpu")
options = {"prompt": "large dog on white", "num_inference_steps": 2, "output_type": "pt"}


def draw() -> torch.Tensor:
    """One image by the same noise, [1, 3, height, width] with values from 0 to 1."""
    return pipe(**options, generator=torch.Generator().manual_seed(1)).images


plain = draw()
print(octavo.apply_(pipe, octavo.Recipe(linear="fp8", attention="fp8")))
scores = compare_images(plain, draw(), lpips=False)
print(f"PSNR {scores.mean_psnr_db:.1f} dB, SSIM {scores.mean_ssim:.4f}")
