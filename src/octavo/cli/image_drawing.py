"""What `octavo image` does with a pipeline: it draws, writes files, and compares."""

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.atomic import write_atomically
from octavo.cli.console import err, out
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.serving.engine.image_request import ImageResult, ImageSampling
    from octavo.serving.engine.omni import Omni

PLAIN = "BF16"
EVERY_S = 0.2  # between two drawings of a bar


@dataclass(frozen=True)
class Drawing:
    """What is drawn, and where it goes."""

    prompts: list[str]
    sampling: "ImageSampling"
    output: Path | None
    fps: float
    is_forced: bool
    max_batch_size: int | None

    def draw(self, plain: "Omni", words: Mapping[str, Any]) -> None:
        """Draw everything with what `words` ask for, and write the files."""
        plain.check(self.sampling)
        files = self._files(plain)
        omni = change(plain, words, self.max_batch_size)
        self._write(omni, self._results(omni, self.sampling, "drawing"), files)

    def draw_both(self, plain: "Omni", words: Mapping[str, Any]) -> None:
        """Draw everything before and after the pipeline is quantized, and write all of it."""
        from octavo.integrations.diffusers.picture_files import png_bytes, target_files
        from octavo.integrations.diffusers.pipeline import check_plain
        from octavo.measure.evaluate.image_scores import draw_side_by_side

        check_plain(plain.pipe)
        check_change(plain, words)
        plain.check(self.sampling)
        files = self._files(plain)
        first = files[0] if len(files) == 1 else files[0].with_stem(files[0].stem[:-2])
        target = first.with_name(f"{first.stem}-compare.png")
        sheets = target_files(target, len(files), is_video=False, is_forced=self.is_forced)
        sampling, name = self._with_seed(), name_of(words)
        before, plain_s = self._timed(plain, sampling, PLAIN)
        changed = change(plain, words, self.max_batch_size)
        after, changed_s = self._timed(changed, sampling, name)
        self._write(changed, after, files)
        pairs = list(zip(_all(before), _all(after), strict=True))
        notes = set()
        for pair, sheet in zip(pairs, sheets, strict=True):
            middle = [frames[len(frames) // 2] for frames in pair]
            panels = draw_side_by_side(middle[0], middle[1], (PLAIN, name))
            write_atomically(sheet, png_bytes(panels))
            notes.add(_print_scores(sheet, *pair))
        for note in sorted(filter(None, notes)):
            err.print(note, soft_wrap=True)
        faster = f"{plain_s / changed_s:.2f} times as fast"
        out.print(f"{PLAIN} {plain_s:.3f} s, {name} {changed_s:.3f} s: {faster}")
        if str(changed.pipe.device) == "cpu":
            err.print("on a CPU FP8 is emulated: its time says nothing about a GPU's")

    def _with_seed(self) -> "ImageSampling":
        """The sampling with a seed: both times the same."""
        seed = self.sampling.seed
        seed = random.SystemRandom().getrandbits(32) if seed is None else seed
        return dataclasses.replace(self.sampling, seed=seed)

    def _timed(
        self, omni: "Omni", sampling: "ImageSampling", name: str
    ) -> "tuple[list[ImageResult], float]":
        """The results and their seconds, after a short run that loads kernels."""
        short = sampling
        if not sampling.extra_args.keys() & {"sigmas", "timesteps"}:  # they are the steps
            short = dataclasses.replace(sampling, num_inference_steps=1)
        self._results(omni, short, f"{name}: warming up")
        start_s = time.perf_counter()
        results = self._results(omni, sampling, name)
        return results, time.perf_counter() - start_s

    def _results(self, omni: "Omni", sampling: "ImageSampling", title: str) -> "list[ImageResult]":
        with _bar(title) as on_step:
            return omni.generate(self.prompts, sampling, on_step=on_step)

    def _files(self, omni: "Omni") -> list[Path]:
        from octavo.integrations.diffusers.picture_files import can_write_mp4, target_files

        is_video = omni.makes_video and self.sampling.num_frames != 1
        path = self.output
        if path is None:
            path = Path("out.png")
            if is_video:
                path = Path("out.mp4" if can_write_mp4() else "out.gif")
                err.print(f"the video goes to {path}")
        num_files = len(self.prompts) * self.sampling.num_images_per_prompt
        return target_files(path, num_files, is_video=is_video, is_forced=self.is_forced)

    def _write(self, omni: "Omni", results: "list[ImageResult]", files: list[Path]) -> None:
        from octavo.integrations.diffusers.picture_files import png_bytes, write_video

        written = iter(files)
        for result in results:
            for index, seed in enumerate(result.seeds):
                file = next(written)
                if result.images:
                    texts = self._texts(omni, result, seed)
                    write_atomically(file, png_bytes(result.images[index], texts))
                else:
                    write_video(result.frames[index], file, self.fps)
                details = f"seed {seed}, {result.num_steps} steps, {result.seconds:.2f} s"
                out.print(f"{file}: {result.prompt!r}, {details}", soft_wrap=True)
        if omni.cache is not None:
            _print_skipped(omni.pipe)

    def _texts(self, omni: "Omni", result: "ImageResult", seed: int) -> dict[str, str]:
        """What a picture's file says about it."""
        options = {**self.sampling.options(), "num_inference_steps": result.num_steps}
        cache = {} if omni.cache is None else {"cache": json.dumps(omni.cache, default=str)}
        return {
            "Software": f"octavo {__version__}",
            "prompt": result.prompt,
            "seed": str(seed),
            "model": omni.model_name,
            "dtype": str(getattr(omni.pipe, "transformer", omni.pipe).dtype).rpartition(".")[2],
            "options": json.dumps(options, default=str),
            "recipe": omni.recipe.to_json(),
            **cache,
        }


def _print_skipped(pipe: Any) -> None:
    """Say what a step cache has done, in the last batch if there were several."""
    from octavo.integrations.diffusers.step_cache import count_cached_steps

    for name, contexts in count_cached_steps(pipe).items():
        for context, counts in contexts.items():
            err.print(f"{name}, {context}: {counts}")


def _print_scores(sheet: Path, before: tuple[Any, ...], after: tuple[Any, ...]) -> str | None:
    """Print the scores of a picture or video; returns why one is missing, if it is."""
    from octavo.measure.evaluate.image_scores import score_images

    scores = score_images(before, after)
    said = [f"PSNR {_mean(scores.psnr_db):.2f} dB", f"SSIM {_mean(scores.ssim):.4f}"]
    if scores.lpips is not None:
        said.append(f"LPIPS {_mean(scores.lpips):.4f}")
    out.print(f"{sheet}: {', '.join(said)}", soft_wrap=True)
    return scores.lpips_note


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def _all(results: "list[ImageResult]") -> list[tuple[Any, ...]]:
    """The frames of each picture (one) or video of all results."""
    return [
        frames for result in results for frames in result.frames or [(x,) for x in result.images]
    ]


def name_of(words: Mapping[str, Any]) -> str:
    """What the pictures with the changes are called."""
    config, recipe = words.get("quantization_config"), words.get("recipe")
    is_fp8 = config is not None or words.get("attention") is not None or recipe is not None
    parts = ["FP8"] if is_fp8 else []
    return " + ".join([*parts, *filter(None, [words["cache_backend"]])])


def check_change(plain: "Omni", words: Mapping[str, Any]) -> None:
    """Raise what `change` would find wrong; nothing changes."""
    from octavo.integrations.diffusers.pipeline import check_recipe, find_components
    from octavo.integrations.diffusers.quantization_config import make_recipe
    from octavo.integrations.diffusers.step_cache import check_step_cache

    rest = dict(words)
    backend, settings = rest.pop("cache_backend"), rest.pop("cache_config")
    recipe = rest.pop("recipe", None)
    if recipe is None:
        config = rest.pop("quantization_config")
        recipe = make_recipe(config, list(find_components(plain.pipe)), **rest)
    if not recipe.is_empty:
        check_recipe(plain.pipe, recipe)
    if backend is not None:
        check_step_cache(plain.pipe, backend, settings)


def change(plain: "Omni", words: Mapping[str, Any], size: int | None) -> "Omni":
    """The same pipeline with what the flags ask for; says what was changed."""
    from octavo.serving.engine.omni import Omni

    changed = Omni(plain.pipe, max_batch_size=size, **words)
    changed.model_name = plain.model_name
    if changed.changes is not None:
        err.print(f"{changed.model_name}: {changed.changes}", soft_wrap=True)
    return changed


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over denoising steps, and what moves it.

    It is drawn between steps alone: a thread would take turns with the Python that is timed.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(*columns, console=err, auto_refresh=False) as progress:
        task = progress.add_task(title, total=None)
        drawn_s = 0.0

        def on_step(num_done: int, total: int) -> None:
            nonlocal drawn_s
            is_due = time.monotonic() - drawn_s > EVERY_S
            progress.update(task, completed=num_done, total=total, refresh=is_due)
            drawn_s = time.monotonic() if is_due else drawn_s

        yield on_step
