"""octavo.Omni on a GPU: the same noise as on a CPU, and FP8 near BF16."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo import ImageSampling, Omni
from octavo.demo.small_image import (
    make_small_image_model,
    save_small_image_model,
)


@pytest.mark.gpu
def test_pictures_of_a_gpu_are_those_of_a_cpu(tmp_path):
    import numpy as np

    save_small_image_model(make_small_image_model(["cat"]), tmp_path)
    sampling = ImageSampling(num_inference_steps=4, seed=3, num_images_per_prompt=2)

    def draw(**options):
        (result,) = Omni(tmp_path, **options).generate("cat", sampling)
        return np.stack([np.asarray(image).astype(int) for image in result.images])

    cpu, cuda = draw(device="cpu"), draw(device="cuda")
    fp8 = draw(device="cuda", quantization="fp8", attention="fp8")
    assert abs(cpu - cuda).mean() < 2 and abs(cuda - fp8).mean() < 4
    assert abs(cuda[0] - cuda[1]).mean() > 10
