"""A drawer without a model: pictures of one color, as many steps as asked for, of some time."""

import threading
import time
from types import SimpleNamespace

from PIL import Image

from octavo.errors import CapacityError, ConfigError, UnsupportedError
from octavo.serving.engine.image_request import ImageResult, nth_seed
from octavo.serving.engine.precision import LayerPrecision, Precision
from octavo_testkit.serving.fake_engine import fp8_weights


class FakeDrawer:
    model_name = "fake"
    precision = Precision((LayerPrecision(kind="linear", num_fp8=3, others={"norm_out": "BF16"}),))
    makes_video = False
    pipe = SimpleNamespace(components={"transformer": fp8_weights(), "scheduler": object()})

    def __init__(self, step_s=0.0):
        self.step_s = step_s
        self.drawn = []
        self.num_steps = 0
        self.can_go_on = threading.Event()
        self.can_go_on.set()

    def check(self, sampling):
        if sampling.negative_prompt is not None:
            raise UnsupportedError("negative_prompt: expected an option of Fake")
        if sampling.height is not None and sampling.height % 16:
            raise ConfigError(f"height: expected a multiple of 16, got {sampling.height}")

    def generate(self, prompts, sampling, *, on_step=None):
        (prompt,) = prompts
        for word, error in (
            ("memory", CapacityError("expected memory")),
            ("refuse", ConfigError("expected words")),
            ("fail", RuntimeError("broken")),
            ("break", RuntimeError("CUDA error: gone")),
        ):
            if word in prompt:
                raise error
        num_steps = sampling.num_inference_steps or 2
        for index in range(num_steps):
            assert self.can_go_on.wait(20)
            time.sleep(self.step_s)
            self.num_steps += 1
            on_step(index + 1, num_steps)
        self.drawn.append((prompt, sampling))
        size = (sampling.width or 16, sampling.height or 16)
        num = sampling.num_images_per_prompt
        seed = 1 if sampling.seed is None else sampling.seed
        return [
            ImageResult(
                prompt=prompt,
                images=tuple(Image.new("RGB", size, (index, 0, 0)) for index in range(num)),
                seeds=tuple(nth_seed(seed, index) for index in range(num)),
                seconds=0.5,
                num_steps=num_steps,
            )
        ]
