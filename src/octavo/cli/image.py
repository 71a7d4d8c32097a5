"""octavo image: images and videos from words, and beside BF16 with scores."""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.atomic import write_atomically
from octavo.cli.console import err, out, progress_bar
from octavo.cli.model_options import LinearOptions, OmniOptions
from octavo.cli.options import Flags, Strict, read_object, takes_settings
from octavo.errors import ConfigError
from octavo.extras import need
from octavo.serving.engine.image_request import ImageSampling

if TYPE_CHECKING:
    from octavo.serving.engine.image_request import ImageResult
    from octavo.serving.engine.omni import Omni

PLAIN = "BF16"

SamplingFlags = Annotated[
    ImageSampling,
    Flags(
        names={"num_images_per_prompt": "--batch -n"},
        help={
            "seed": "Of the first image of each prompt; the next ones have the seeds after it. "
            "Left out: a random one, which is printed."
        },
        without=("extra_args",),
    ),
]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What is drawn, where it goes, and what it is compared with.

    Attributes:
        model: A pipeline's folder or hub name. Left out: small-image, which comes with octavo and
            draws 48 × 48 pixels from simple words.
        prompts: What to draw; may be given more than once.
        extra_args: Other arguments of the pipeline as JSON, by their names there.
        max_batch_size: Images at once; left out, all.
        dtype: Of the weights: bfloat16, float16 or float32.
        device: cuda, cuda:1, cpu; left out, a GPU if there is one.
        output: out.png if left out; several are out-0.png, out-1.png, … A video: .mp4 (needs
            imageio and imageio-ffmpeg), .gif, or a folder of PNG files.
        fps: Frames of a video in a second.
        is_forced: Replace files that exist.
        compare: bf16: draw the same seeds without quantization and cache first, and write both and
            their difference beside each other (out-compare.png); print PSNR, SSIM, LPIPS if
            installed, and the time of both.
    """

    model: Annotated[str | None, typer.Option("--model", "-m")] = None
    prompts: Annotated[tuple[str, ...], typer.Option("--prompt", "-p")] = ()
    extra_args: str | None = None
    max_batch_size: Annotated[int | None, typer.Option(min=1)] = None
    dtype: str = "bfloat16"
    device: str | None = None
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None
    fps: float = 16.0
    is_forced: Annotated[bool, typer.Option("--force")] = False
    compare: str | None = None

    def check(self, name: str) -> None:
        """Raise for flags that contradict each other; name: of what the flags change."""
        if self.compare not in (None, "bf16"):
            raise ConfigError(f"expected --compare bf16, got {self.compare!r}")
        if self.compare and self.dtype != "bfloat16":
            raise ConfigError(f"--compare bf16: expected --dtype bfloat16, got {self.dtype}")
        if self.compare and not name:
            flags = "--quantization, --attention or --cache-backend"
            raise ConfigError(f"--compare bf16: expected something to compare it with: {flags}")
        if not self.fps > 0:
            raise ConfigError(f"expected --fps above 0, got {self.fps}")
        if not self.prompts:
            raise ConfigError('expected a --prompt, such as --prompt "cat on blue", got none')

    def draw(self, plain: "Omni", sampling: ImageSampling, words: Mapping[str, Any]) -> None:
        """Draw everything with what `words` ask for, and without before it if they are compared."""
        from octavo.integrations.diffusers.image_files import can_write_mp4, target_files

        if self.compare:
            check_change(plain, words)
        plain.check(sampling)
        is_video = plain.makes_video and sampling.num_frames != 1
        path = self.output or Path("out.png")
        if is_video and self.output is None:
            path = Path("out.mp4" if can_write_mp4() else "out.gif")
            err.print(f"the video goes to {path}")
        num_files = len(self.prompts) * sampling.num_images_per_prompt
        files = target_files(path, num_files, is_video=is_video, is_forced=self.is_forced)
        if self.compare:
            return self._draw_both(plain, sampling, words, files)
        omni = self._changed(plain, words)
        self._write(omni, sampling, self._results(omni, sampling, "drawing"), files)

    def _draw_both(
        self, plain: "Omni", sampling: ImageSampling, words: Mapping[str, Any], files: list[Path]
    ) -> None:
        from octavo.integrations.diffusers.image_files import png_bytes, target_files
        from octavo.measure.evaluate.image_scores import draw_side_by_side

        first = files[0] if len(files) == 1 else files[0].with_stem(files[0].stem[:-2])
        target = first.with_name(f"{first.stem}-compare.png")
        sheets = target_files(target, len(files), is_video=False, is_forced=self.is_forced)
        if sampling.seed is None:  # the same one for both
            sampling = replace(sampling, seed=random.SystemRandom().getrandbits(32))
        name = name_of(words)
        before, plain_s = self._timed(plain, sampling, PLAIN)
        changed = self._changed(plain, words)
        after, changed_s = self._timed(changed, sampling, name)
        self._write(changed, sampling, after, files)
        notes = set()
        for one, other, sheet in zip(_frames(before), _frames(after), sheets, strict=True):
            middle = len(one) // 2
            panels = draw_side_by_side(one[middle], other[middle], (PLAIN, name))
            write_atomically(sheet, png_bytes(panels))
            notes.add(_print_scores(sheet, one, other))
        for note in sorted(filter(None, notes)):
            err.print(note, soft_wrap=True)
        faster = f"{plain_s / changed_s:.2f} times as fast"
        out.print(f"{PLAIN} {plain_s:.3f} s, {name} {changed_s:.3f} s: {faster}")
        if str(changed.pipe.device) == "cpu":
            err.print("on a CPU FP8 is emulated: its time says nothing about a GPU's")

    def _changed(self, plain: "Omni", words: Mapping[str, Any]) -> "Omni":
        """The same pipeline with what the flags ask for; says what was changed."""
        from octavo.serving.engine.omni import Omni

        changed = Omni(plain.pipe, max_batch_size=self.max_batch_size, **words)
        changed.model_name = plain.model_name
        if changed.changes is not None:
            err.print(f"{changed.model_name}: {changed.changes}", soft_wrap=True)
        return changed

    def _timed(
        self, omni: "Omni", sampling: ImageSampling, name: str
    ) -> "tuple[list[ImageResult], float]":
        """The results and their seconds, after a short run that loads kernels."""
        short = sampling
        if not sampling.extra_args.keys() & {"sigmas", "timesteps"}:  # they are the steps
            short = replace(sampling, num_inference_steps=1)
        self._results(omni, short, f"{name}: warming up")
        start_s = time.perf_counter()
        results = self._results(omni, sampling, name)
        return results, time.perf_counter() - start_s

    def _results(self, omni: "Omni", sampling: ImageSampling, title: str) -> "list[ImageResult]":
        with progress_bar(title, every_s=0.2) as move:
            return omni.generate(
                self.prompts, sampling, on_step=lambda done, total: move(title, done, total)
            )

    def _write(
        self, omni: "Omni", sampling: ImageSampling, results: "list[ImageResult]", files: list[Path]
    ) -> None:
        from octavo.integrations.diffusers.image_files import write_results
        from octavo.integrations.diffusers.step_cache import count_cached_steps

        for line in write_results(omni, sampling.options(), results, files, self.fps):
            out.print(line, soft_wrap=True)
        # Of a step cache: what it did, in the last batch if there were several.
        found = {} if omni.cache is None else count_cached_steps(omni.pipe)
        for name, contexts in found.items():
            for context, counts in contexts.items():
                err.print(f"{name}, {context}: {counts}")


@takes_settings
def image(
    drawing: Drawing,
    linear: LinearOptions,
    pipeline: OmniOptions,
    sampling: SamplingFlags,
    strict: Strict = False,
) -> None:
    """Draw images, or a video, from words: in FP8 if asked for.

    octavo image --prompt "cat on blue" --quantization fp8 --compare bf16

    octavo image --model Qwen/Qwen-Image --prompt "a lighthouse at dusk" --quantization fp8
    --ignored-layers img_mlp --attention fp8 --num-inference-steps 50 --seed 1 -o lighthouse.png

    Prompt, seed and recipe are in the PNG file. An option that the pipeline does not have is an
    error, and so is a pattern that matches no layer.
    """
    need("octavo image", "diffusers")
    words = pipeline.words(linear)
    extra_args = read_object("--extra-args", drawing.extra_args) or {}
    drawing.check(name_of(words))
    from octavo.serving.engine.omni import Omni

    with err.status("loading the pipeline"):
        plain = Omni(
            drawing.model,
            dtype=drawing.dtype,
            device=drawing.device,
            max_batch_size=drawing.max_batch_size,
        )
    drawing.draw(plain, replace(sampling, extra_args=extra_args), words)


def name_of(words: Mapping[str, Any]) -> str:
    """What images with the changes are called; empty if nothing changes."""
    is_fp8 = any(words.get(x) is not None for x in ("quantization_config", "attention", "recipe"))
    return " + ".join(["FP8"] * is_fp8 + [*filter(None, [words["cache_backend"]])])


def check_change(plain: "Omni", words: Mapping[str, Any]) -> None:
    """Raise what changing the pipeline would find wrong; nothing changes."""
    from octavo.integrations.diffusers import pipeline
    from octavo.integrations.diffusers.step_cache import check_step_cache

    pipeline.check_plain(plain.pipe)
    rest = dict(words)
    backend, settings = rest.pop("cache_backend"), rest.pop("cache_config")
    recipe = rest.pop("recipe", None)
    if recipe is None:
        config = rest.pop("quantization_config")
        recipe = pipeline.make_recipe(config, list(pipeline.find_components(plain.pipe)), **rest)
    if not recipe.is_empty:
        pipeline.check_recipe(plain.pipe, recipe)
    if backend is not None:
        check_step_cache(plain.pipe, backend, settings)


def _frames(results: "list[ImageResult]") -> list[tuple[Any, ...]]:
    """The frames of each image (one) or video of all results."""
    return [
        frames for result in results for frames in result.frames or [(x,) for x in result.images]
    ]


def _print_scores(sheet: Path, before: tuple[Any, ...], after: tuple[Any, ...]) -> str | None:
    """Print the scores of an image or video; returns why one is missing, if it is."""
    from statistics import fmean

    from octavo.measure.evaluate.image_scores import score_images

    scores = score_images(before, after)
    said = [f"PSNR {fmean(scores.psnr_db):.2f} dB", f"SSIM {fmean(scores.ssim):.4f}"]
    if scores.lpips is not None:
        said.append(f"LPIPS {fmean(scores.lpips):.4f}")
    out.print(f"{sheet}: {', '.join(said)}", soft_wrap=True)
    return scores.lpips_note
