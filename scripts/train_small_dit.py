"""Train the small image model that octavo ships: emoji on colored backgrounds, from words.

    python scripts/draw_emoji.py --font NotoColorEmoji.ttf --output build/emoji.npz
    python scripts/train_small_dit.py --minutes 6               on a GPU: the shipped weights
    python scripts/train_small_dit.py --tiny --steps 3 --device cpu --batch 4

Pictures are composed on the device: a sprite, large or small, moved by some pixels, in the mirror
or not, on one of nine colors. Prompts say it in words ("small cat on blue"), some leave out the
size or the color, and one in ten is empty, for guidance. Each name and size is never seen on one
of the colors: these pictures are drawn for the score.

The folder of --state gets checkpoint.pt, from which the next run goes on, progress.jsonl and
contact_sheet.png. At the end that of --output gets the model's files in bfloat16, and record.jsonl
with the score of the held-out pictures. What is kept and scored is a moving average of the weights.
"""

import argparse
import copy
import io
import math
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from octavo.atomic import write_atomically
from octavo.demo.small_image import (
    FOLDER,
    SmallImagePipeline,
    load_small_image_model,
    make_small_image_model,
    save_small_image_model,
)
from octavo.demo.small_image_training import (
    COLORS,
    Pictures,
    Score,
    SmallImageLoss,
    prompt,
    score,
    vocabulary,
)
from octavo.errors import ConfigError
from octavo.measure import store
from octavo.measure.records import Machine, Measurement

# Few and narrow layers, for tests.
TINY: dict[str, Any] = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 6, 6),
}
AVERAGE = 0.999  # what a step leaves of the moving average of the weights
COMMAND = "python scripts/train_small_dit.py"
SHEET = "contact_sheet.png"
SHEET_COLUMNS, SHEET_ZOOM, CAPTION = 10, 3, 14  # caption: pixels below a picture


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is asked for."""

    data: Path
    minutes: float
    steps: int
    batch: int
    names: int | None
    tiny: bool
    compile: bool
    eager: bool
    device: str
    output: Path
    state: Path
    learning_rate: float
    eval_pictures: int
    eval_every: int
    final_pictures: int | None
    start: Path | None
    seed: int


def read_data(path: Path, num_names: int | None) -> dict[str, Any]:
    """The arrays that scripts/draw_emoji.py writes, of the first names or of all."""
    if not path.is_file():
        raise ConfigError(f"expected pictures at {path}, got no file: run scripts/draw_emoji.py")
    with np.load(path) as arrays:
        return {
            "sprites": torch.from_numpy(arrays["sprites"][:num_names]),
            "names": arrays["names"][:num_names].tolist(),
            "sizes": arrays["sizes"].tolist(),
            "can_flip": torch.from_numpy(arrays["can_flip"][:num_names]),
        }


class Run:
    """One training run: model, moving average, optimizer, schedule, checkpoints."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.set_float32_matmul_precision("high")
        # Its gradient fails for these lengths (cuDNN 9.19, H200: an illegal memory access).
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.manual_seed(settings.seed)
        arrays = read_data(settings.data, settings.names)
        words = vocabulary(arrays["names"], arrays["sizes"])
        self.model = self._make_model(words).to(settings.device)
        self.data = Pictures.make(**arrays, words=self.model.words, device=settings.device)
        self.average = copy.deepcopy(self.model)
        self.loss = SmallImageLoss(self.model)
        self.parameters = _parameters(self.model)
        self.is_cuda = settings.device.startswith("cuda")
        self.learning_rate = torch.tensor(0.0, device=settings.device)
        self.optimizer = self._make_optimizer()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.last_loss = torch.tensor(0.0)
        self.step, self.seconds = 0, 0.0
        if self.checkpoint.is_file():
            self._resume()
        if settings.compile:
            self.model.transformer.compile_repeated_blocks(fullgraph=True)

    def _make_model(self, words: list[str]) -> SmallImagePipeline:
        if self.settings.start is None:
            return make_small_image_model(words, **(TINY if self.settings.tiny else {}))
        model = load_small_image_model(self.settings.start, torch.float32)
        if model.words.config.words != words:
            raise ConfigError(
                f"expected the words of {self.settings.data} in {self.settings.start}, got others: "
                "start from a model that was trained with the same pictures"
            )
        return model

    def _make_optimizer(self) -> torch.optim.Optimizer:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)  # in place from now on: graphs know where
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups,
            lr=self.learning_rate,
            betas=(0.9, 0.98),
            fused=self.is_cuda or None,
            capturable=self.is_cuda,
        )

    @property
    def checkpoint(self) -> Path:
        return self.settings.state / "checkpoint.pt"

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.settings.device, weights_only=True)
        for model, saved in ((self.model, state["model"]), (self.average, state["average"])):
            model.transformer.load_state_dict(saved["transformer"])
            model.words.load_state_dict(saved["words"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.step, self.seconds = state["step"], state["seconds"]
        torch.manual_seed(self.settings.seed + self.step)  # other pictures than before

    def save(self) -> None:
        """Write what `_resume` reads, atomically."""
        content = io.BytesIO()
        state = {
            "model": _state(self.model),
            "average": _state(self.average),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, content)
        write_atomically(self.checkpoint, content.getvalue())

    @property
    def done(self) -> float:
        """The share of the run that is over, by steps or by time, whichever is further."""
        return max(self.step / self.settings.steps, self.seconds / (60 * self.settings.minutes))

    def learn(self) -> Tensor:
        """One step; returns the loss, still on the device."""
        warm_up = min(1.0, (self.step + 1) / 200)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.done)))
        self.learning_rate.fill_(self.settings.learning_rate * warm_up * (0.01 + 0.99 * cosine))
        self.step += 1
        if self.settings.eager or not self.is_cuda:
            loss = self._learn()
        else:
            if self.graph is None:
                self._capture()
            assert self.graph is not None
            self.graph.replay()
            loss = self.last_loss.clone()
        keep = min(AVERAGE, self.step / (self.step + 9))
        with torch.no_grad():
            torch._foreach_lerp_(_parameters(self.average), self.parameters, 1 - keep)
        return loss

    def _capture(self) -> None:
        """A step as a CUDA graph: thousands of small kernels without a launch of each."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # steps like others: what they learn stays
                self._learn()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.last_loss = self._learn()

    def _learn(self) -> Tensor:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        pictures, ids = self.data.batch(self.settings.batch)
        device_type = "cuda" if self.is_cuda else "cpu"
        with torch.autocast(device_type, torch.bfloat16, enabled=self.is_cuda):
            loss: Tensor = self.loss(pictures, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return loss.detach()


def _parameters(model: SmallImagePipeline) -> list[Tensor]:
    return [*model.transformer.parameters(), *model.words.parameters()]


def _state(model: SmallImagePipeline) -> dict[str, dict[str, Tensor]]:
    return {"transformer": model.transformer.state_dict(), "words": model.words.state_dict()}


def evaluate(
    model: SmallImagePipeline, data: Pictures, num_pictures: int | None, sheet: Path
) -> Score:
    """Draw held-out pictures (all, or some of different names), score them and show them."""
    total = len(data.names) * len(data.sizes)
    count = total if num_pictures is None else min(num_pictures, total)
    picked = torch.linspace(0, total - 1, count, device=data.colors.device).long()
    name, size = picked // len(data.sizes), picked % len(data.sizes)
    color = data.held_out_color(name, size)
    colors = list(COLORS)
    prompts = [
        prompt(data.names[n], data.sizes[s], colors[c])
        for n, s, c in zip(name.tolist(), size.tolist(), color.tolist(), strict=True)
    ]
    parts = [
        model.generate(prompts[start : start + 128], seed=start)
        for start in range(0, len(prompts), 128)
    ]
    pictures = torch.cat(parts)
    write_sheet(sheet, pictures, prompts)
    return score(pictures, data, name, size, color)


def write_sheet(path: Path, pictures: Tensor, prompts: list[str]) -> None:
    """Pictures, uint8 [batch, height, width, 3], in rows, each above its prompt, as a PNG."""
    from PIL import Image, ImageDraw

    side = SHEET_ZOOM * pictures.shape[1]
    num_columns = min(SHEET_COLUMNS, len(prompts))
    num_rows = -(-len(prompts) // num_columns)
    sheet = Image.new("RGB", (num_columns * side, num_rows * (side + CAPTION)), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (picture, text) in enumerate(zip(pictures, prompts, strict=True)):
        x, y = i % num_columns * side, i // num_columns * (side + CAPTION)
        image = Image.fromarray(picture.numpy())
        sheet.paste(image.resize((side, side), Image.Resampling.BICUBIC), (x, y))
        pen.text((x + 2, y + side + 1), text, fill="black")
    content = io.BytesIO()
    sheet.save(content, "PNG")
    write_atomically(path, content.getvalue())


def train(settings: Settings) -> Run:
    """Train until the steps or the minutes are over, writing progress and checkpoints."""
    settings.state.mkdir(parents=True, exist_ok=True)
    run, sheet = Run(settings), settings.state / SHEET
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("starting", total=1.0)
        last, losses = time.monotonic(), deque[Tensor](maxlen=50)
        while run.done < 1:
            losses.append(run.learn())
            if run.is_cuda and run.step % 10 == 0:
                torch.cuda.synchronize()  # else the host would be far ahead of the time it measures
            now = time.monotonic()
            run.seconds, last = run.seconds + now - last, now
            is_over = run.done >= 1
            if run.step % 50 == 0 or is_over:
                rate = run.step / run.seconds
                text = f"step {run.step}  loss {mean(losses):.4f}  {rate:.2f} steps/s"
                progress.update(task, description=text, completed=min(1.0, run.done))
            if run.step % settings.eval_every == 0 or is_over:
                found = evaluate(run.average, run.data, settings.eval_pictures, sheet)
                run.save()
                note(run, mean(losses), found)
                progress.console.print(
                    f"step {run.step}  {run.seconds:.0f} s  loss {mean(losses):.4f}  recognized "
                    f"{found.recognized:.1%}  PSNR {found.psnr_db:.1f} dB"
                )
    return run


def mean(losses: deque[Tensor]) -> float:
    return float(torch.stack(list(losses)).mean())


def note(run: Run, loss: float, found: Score) -> None:
    """Append one record of progress."""
    record = Measurement(
        op="train_small_dit",
        impl="diffusers",
        case={"step": run.step, "batch": run.settings.batch, "names": len(run.data.names)},
        values={
            "loss": loss,
            "recognized": found.recognized,
            "psnr_db": found.psnr_db,
            "train_s": run.seconds,
        },
        machine=machine(run.settings.device),
        command=COMMAND,
    )
    store.append(run.settings.state / "progress.jsonl", [record])


def machine(device: str) -> Machine:
    is_cuda = device.startswith("cuda")
    gpu = torch.cuda.get_device_name(device) if is_cuda else None
    capability = torch.cuda.get_device_capability(device) if is_cuda else None
    return Machine.current(gpu=gpu, capability=capability)


def finish(run: Run) -> Measurement:
    """Write the model's files and a record of the score that they have once loaded again."""
    settings = run.settings
    size = save_small_image_model(run.average, settings.output)
    loaded = load_small_image_model(settings.output).to(settings.device)
    found = evaluate(loaded, run.data, settings.final_pictures, settings.state / SHEET)
    record = Measurement(
        op="small_image_score",
        impl="bf16",
        case={"data": "emoji, held-out colors", "names": len(run.data.names)},
        values={
            "recognized": found.recognized,
            "psnr_db": found.psnr_db,
            "weights_bytes": size,
            "train_s": run.seconds,
        },
        machine=machine(settings.device),
        command=COMMAND,
    )
    store.append(settings.output / "record.jsonl", [record])
    return record


def parse(arguments: list[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--data", type=Path, default=Path("build/emoji.npz"), help="pictures")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, at most")
    parser.add_argument("--steps", type=int, default=10**6, help="at most")
    parser.add_argument("--batch", type=int, default=256, help="pictures in a step")
    parser.add_argument("--names", type=int, help="use only the first ones")
    parser.add_argument("--tiny", action="store_true", help="a model too small to draw, for tests")
    parser.add_argument("--compile", action="store_true", help="the blocks, with torch.compile")
    parser.add_argument("--eager", action="store_true", help="without a CUDA graph")
    parser.add_argument("--device", default=device)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the model")
    parser.add_argument("--state", type=Path, default=Path("build/small_dit"), help="folder")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--eval-pictures", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=2000, help="steps")
    parser.add_argument("--final-pictures", type=int, help="all held-out ones unless given")
    parser.add_argument("--start", type=Path, help="folder of a model that learns on")
    parser.add_argument("--seed", type=int, default=0, help="of pictures and noise")
    return Settings(**vars(parser.parse_args(arguments)))


def main() -> None:
    print(finish(train(parse())).to_json())


if __name__ == "__main__":
    main()
