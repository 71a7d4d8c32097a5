"""Images and videos as files: where they go, what they carry, which kinds can be written."""

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.atomic import temporary_path, write_atomically
from octavo.brief import list_names
from octavo.errors import ConfigError, UnsupportedError
from octavo.version import __version__

MP4_PACKAGES = (("imageio", "imageio_ffmpeg"), ("cv2",))


def png_bytes(image: Any, texts: Mapping[str, str] | None = None) -> bytes:
    """A pillow image as a PNG file, with texts that viewers and `Image.text` show."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for key, text in (texts or {}).items():
        info.add_itxt(key, text)
    content = io.BytesIO()
    image.save(content, "PNG", pnginfo=info)
    return content.getvalue()


def can_write_mp4() -> bool:
    """Whether a package that writes .mp4 files is installed."""
    return any(all(find_spec(name) for name in names) for names in MP4_PACKAGES)


def target_files(path: Path, num_files: int, *, is_video: bool, is_forced: bool) -> list[Path]:
    """Where so many images or videos go: `path`, or path-0, path-1, … of its suffix.

    Raises ConfigError before anything is drawn if there can be no such files, or if there are and
    they are not to be replaced. A video's path without a suffix is a folder of PNG files.
    """
    suffixes = (".mp4", ".gif", "") if is_video else (".png",)
    if path.suffix not in suffixes:
        words = ".mp4, .gif or no suffix (a folder of PNG files)" if is_video else ".png"
        raise ConfigError(f"expected an output that ends in {words}, got {path}")
    if path.suffix == ".mp4" and not can_write_mp4():
        raise UnsupportedError(
            f"{path}: expected a package that writes .mp4, got none: pip install imageio "
            "imageio-ffmpeg; .gif, or a folder, needs none"
        )
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"expected an existing folder for {path}, got none")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"expected a folder for {path} that can be written to, got {folder}")
    numbered = [path.with_stem(f"{path.stem}-{index}") for index in range(num_files)]
    files = [path] if num_files == 1 else numbered
    existing = [str(file) for file in files if file.exists()]
    if existing and not is_forced:
        raise ConfigError(
            f"expected outputs that are not there yet, got {list_names(existing)}: choose "
            "another name, or --force"
        )
    if folders := [str(file) for file in files if file.is_dir()]:
        raise ConfigError(f"expected files or nothing in their place, got {list_names(folders)}")
    return files


def write_results(
    omni: Any, options: Mapping[str, Any], results: Sequence[Any], files: Sequence[Path], fps: float
) -> Iterator[str]:
    """Write the results of an `Omni` to their files, and say what each file is.

    options: what the pipeline was called with, which the files of images carry.
    """
    written = iter(files)
    for result in results:
        for index, seed in enumerate(result.seeds):
            file = next(written)
            if result.images:
                texts = _texts(omni, options, result, seed)
                write_atomically(file, png_bytes(result.images[index], texts))
            else:
                write_video(result.frames[index], file, fps)
            details = f"seed {seed}, {result.num_steps} steps, {result.seconds:.2f} s"
            yield f"{file}: {result.prompt!r}, {details}"


def _texts(omni: Any, options: Mapping[str, Any], result: Any, seed: int) -> dict[str, str]:
    """What an image's file says about it."""
    options = {**options, "num_inference_steps": result.num_steps}
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


def write_video(frames: Sequence[Any], path: Path, fps: float) -> None:
    """Write pillow images as a .gif or .mp4 file, or else as a folder of PNG files."""
    if path.suffix == ".gif":
        content = io.BytesIO()
        first, *others = (frame.convert("RGB") for frame in frames)
        options = {"append_images": others, "loop": 0}
        # A GIF counts in hundredths of a second.
        duration_ms = max(10, round(100 / fps) * 10)
        first.save(content, "GIF", save_all=True, duration=duration_ms, **options)
        write_atomically(path, content.getvalue())
        return
    with temporary_path(path.absolute().parent, is_folder=True) as folder:
        if path.suffix == ".mp4":
            from diffusers.utils import export_to_video

            # The writer takes a path: a file of its own, which then takes the place of the other.
            video = folder / path.name
            # Sides are multiples of 2 at least; by default it would scale to multiples of 16.
            export_to_video(list(frames), str(video), fps=fps, macro_block_size=2)
            os.replace(video, path)
        else:
            for index, frame in enumerate(frames):
                write_atomically(folder / f"frame-{index:04d}.png", png_bytes(frame))
            folder.rename(path)
