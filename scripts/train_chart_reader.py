"""Train the chart reader that octavo ships, on charts that are drawn while it learns.

    python scripts/train_chart_reader.py --minutes 8            on a GPU: the shipped weights
    python scripts/train_chart_reader.py --steps 3 --device cpu --batch 4 --workers 1

Worker processes draw charts and ask questions about them; the model reads each batch of images a
few times, with other questions. A sequence is an image, several questions with their answers, and
at last the whole chart in words, or questions of one or two words: dense practice. Questions do not
see each other. Answers count in the loss, and what the vision tower knows at the places of labels
and values (guides, which are not part of the reader). Every image of a batch has one size, so that
whole batches go through the tower without loops.

The folder of --state gets checkpoint.pt, from which the next run goes on, and progress.jsonl. At
the end that of --output gets the reader's files in bfloat16, and record.jsonl with its accuracy on
held-out charts.
"""

import argparse
import io
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from octavo.atomic import write_atomically
from octavo.demo.chart_drawing import Place, draw_with_places, generated_questions
from octavo.demo.chart_reader import (
    END,
    FOLDER,
    MERGE,
    PATCH,
    SPECIAL,
    ChartReader,
    load_chart_reader,
    make_chart_reader,
    make_tokenizer,
    save_chart_reader,
)
from octavo.demo.chart_reader_training import (
    IGNORED,
    ChartReaderLoss,
    Guides,
    equal_images,
)
from octavo.demo.charts import (
    KINDS,
    SIZES,
    Chart,
    description,
    make_chart,
    make_questions,
    practice,
    vocabulary,
)
from octavo.errors import ConfigError
from octavo.measure import store
from octavo.measure.evaluate.chartqa import evaluate, relaxed_accuracy
from octavo.measure.evaluate.question_files import ChartQuestion
from octavo.measure.records import Machine, Measurement, Scalar
from octavo.measure.rows import Row
from octavo.numerics.narrow_products import use_float32_products

Reading = tuple[Tensor, ...]  # images, ids, labels, segments, places

FIRST_SEED = 10**9  # held-out charts have seeds below
QUESTIONS, SHORT = 5, 7
TEXT_TOKENS = 112  # after the image: questions with answers, and the description or short ones
# What belongs to a place: names, and the digits of the value in the first or only series, in the
# second one.
FACTS = ("label", "series", "color", "tens", "ones", "second tens", "second ones")
MAX_PLACES = 12


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is asked for."""

    minutes: float
    steps: int
    batch: int
    reuse: int
    workers: int
    device: str
    output: Path
    state: Path
    kinds: tuple[str, ...]
    learning_rate: float
    eval_questions: int
    eval_every: int
    final_questions: int
    start: Path | None
    first_seed: int


@dataclass(frozen=True)
class Batch:
    """Images of one size, uint8 [batch, height, width, 3], and texts for each reading of them.

    texts: int64 [reuse, 3, batch, tokens]: ids; labels, IGNORED except on answers; segments, the
    number of each question. places: int64 [batch, MAX_PLACES, 1 + FACTS].
    """

    images: np.ndarray[Any, Any]
    texts: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any]


@cache
def _reader_of_texts() -> ChartReader:
    return ChartReader(None, make_tokenizer(vocabulary()))


def make_batch(seed: int, settings: Settings) -> Batch:
    """The batch of a seed; what worker processes run."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    width, height = rng.choice(SIZES["plain"])
    num_tokens = (width // PATCH // MERGE) * (height // PATCH // MERGE)
    images = np.empty((settings.batch, height, width, 3), np.uint8)
    places = np.empty((settings.batch, MAX_PLACES, 1 + len(FACTS)), np.int64)
    texts: list[list[list[list[int]]]] = [[] for _ in range(settings.reuse)]
    for i in range(settings.batch):
        chart_seed = FIRST_SEED + seed * settings.batch + i
        chart = make_chart(chart_seed, kinds=settings.kinds)  # type: ignore[arg-type]
        chart = replace(chart, style=replace(chart.style, width=width, height=height))
        image, written = draw_with_places(chart)
        images[i], places[i] = np.asarray(image), _places(chart, written)
        for turn in range(settings.reuse):
            asked = make_questions(chart, chart_seed * settings.reuse + turn, QUESTIONS)
            pairs = [(question.text, question.answer) for question in asked]
            # Reading aloud teaches to read; short questions, to find what one asks for.
            more = [description(chart)] if turn == 0 else practice(chart, chart_seed + turn, SHORT)
            pairs += [(question.text, question.answer) for question in more]
            texts[turn].append(_conversation(pairs, num_tokens))
    return Batch(images, np.array(texts).swapaxes(1, 2), places)


def _places(chart: Chart, written: list[Place]) -> np.ndarray[Any, Any]:
    """The token of the image at each place, and the facts there as tokens of text."""
    found = np.full((MAX_PLACES, 1 + len(FACTS)), IGNORED, np.int64)
    found[:, 0] = 0
    side, across = PATCH * MERGE, chart.style.width // (PATCH * MERGE)
    for row, place in zip(found, written, strict=False):
        row[0] = int(place.y) // side * across + int(place.x) // side
        for name, text in _facts(chart, place).items():
            row[1 + FACTS.index(name)] = _reader_of_texts().encode(text)[0]
    return found


def _facts(chart: Chart, place: Place) -> dict[str, str]:
    """What belongs to a place, by the names in FACTS."""
    facts: dict[str, str] = {}
    series = chart.series[place.series]
    if place.kind != "series":
        facts["label"] = chart.labels[place.label]
    if place.kind != "label" and series:
        facts["series"] = series
    if place.kind != "label" or chart.is_colored_by_label or not series:
        facts["color"] = chart.colors[place.label if chart.is_colored_by_label else place.series]
    if place.kind == "value":
        facts |= _digits(chart.values[place.series][place.label])
    if place.kind == "label":
        for prefix, row in zip(("", "second "), chart.values, strict=False):
            facts |= _digits(row[place.label], prefix)
    return facts


def _digits(value: int, prefix: str = "") -> dict[str, str]:
    """Both digits of a value below 100; one without tens has the mark of the end there."""
    tens = str(value // 10) if value > 9 else END
    return {f"{prefix}tens": tens, f"{prefix}ones": str(value % 10)}


def _conversation(pairs: list[tuple[str, str]], num_tokens: int) -> list[list[int]]:
    """Tokens, labels and segments of an image and what is said about it, padded to one length."""
    reader = _reader_of_texts()
    ids = reader.prompt("", num_tokens)
    labels, segments = [IGNORED] * len(ids), [0] * len(ids)
    total = len(ids) + TEXT_TOKENS
    for number, (question, answer) in enumerate(pairs, start=1):
        asked, said = reader.encode(question), [*reader.encode(answer), SPECIAL.index(END)]
        ids += asked + said
        labels += [IGNORED] * len(asked) + said
        segments += [number] * len(asked + said)
    if len(ids) > total:
        raise ConfigError(f"expected at most {TEXT_TOKENS} tokens of text, got {pairs}")
    num_missing = total - len(ids)
    padding = len(pairs) + 1
    return [
        ids + [0] * num_missing,
        labels + [IGNORED] * num_missing,
        segments + [padding] * num_missing,
    ]


class Feed:
    """Batches from worker processes, each handed out `reuse` times among others."""

    def __init__(self, settings: Settings, first: int) -> None:
        self.settings, self.next_seed = settings, first
        self.pool = ProcessPoolExecutor(settings.workers, mp_context=get_context("spawn"))
        self.pending: deque[Future[Batch]] = deque()
        self.readings: list[Reading] = []
        self.rng = random.Random(first)

    def __iter__(self) -> Iterator[Reading]:
        num_waiting = 4 * self.settings.reuse  # readings of one batch of images come apart
        while True:
            while len(self.readings) < num_waiting:
                while len(self.pending) < 3 * self.settings.workers:
                    self.pending.append(self.pool.submit(make_batch, self.next_seed, self.settings))
                    self.next_seed += 1
                self._take(self.pending.popleft().result())
            yield self.readings.pop(self.rng.randrange(len(self.readings)))

    def _take(self, batch: Batch) -> None:
        device = self.settings.device
        images, places = (torch.from_numpy(x).to(device) for x in (batch.images, batch.places))
        for texts in torch.from_numpy(batch.texts).to(device):
            self.readings.append((images, *texts, places))

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


class _Graph:
    """A step as a CUDA graph: thousands of small kernels without a launch of each."""

    def __init__(self, learn: Callable[[Reading], Tensor], reading: Reading) -> None:
        self.reading = tuple(x.clone() for x in reading)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # steps like others: what they learn stays
                learn(self.reading)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = learn(self.reading)

    def __call__(self, reading: Reading) -> Tensor:
        for mine, given in zip(self.reading, reading, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.loss.clone()


class Run:
    """One training run: model, optimizer, schedule, checkpoints."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.set_float32_matmul_precision("high")
        self.reader = make_chart_reader(vocabulary())
        if settings.start is not None:
            first = load_chart_reader(settings.start, torch.float32)
            self.reader.model.load_state_dict(first.model.state_dict())
        self.reader.to(settings.device)
        text = self.reader.model.config.text_config
        self.guides = Guides(text.hidden_size, text.vocab_size, len(FACTS)).to(settings.device)
        self.loss = ChartReaderLoss(self.reader.model, self.guides)
        self.parameters = [*self.reader.model.parameters(), *self.guides.parameters()]
        self.is_cuda = settings.device.startswith("cuda")
        self.learning_rate = torch.tensor(0.0, device=settings.device)
        self.optimizer = self._make_optimizer()
        self.graphs: dict[tuple[int, ...], _Graph] = {}
        self.step, self.seconds, self.next_seed = 0, 0.0, settings.first_seed
        if self.checkpoint.is_file():
            self._resume()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        parameters = self.parameters
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)  # in place from now on: graphs know where
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.05},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
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
        self.reader.model.load_state_dict(state["model"])
        self.guides.load_state_dict(state["guides"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.step, self.seconds = state["step"], state["seconds"]
        self.next_seed = state["next_seed"]

    def save(self, next_seed: int) -> None:
        """Write what `_resume` reads, atomically."""
        content = io.BytesIO()
        state = {
            "model": self.reader.model.state_dict(),
            "guides": self.guides.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "next_seed": next_seed,
        }
        torch.save(state, content)
        write_atomically(self.checkpoint, content.getvalue())

    @property
    def done(self) -> float:
        """The share of the run that is over, by steps or by time, whichever is further."""
        return max(self.step / self.settings.steps, self.seconds / (60 * self.settings.minutes))

    def learn(self, reading: Reading) -> Tensor:
        """One step; returns the loss, still on the device."""
        warm_up = min(1.0, (self.step + 1) / 300)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.done)))
        self.learning_rate.fill_(self.settings.learning_rate * warm_up * (0.01 + 0.99 * cosine))
        self.step += 1
        if not self.is_cuda:
            return self._learn(reading)
        shape = tuple(reading[0].shape)
        if shape not in self.graphs:
            self.graphs[shape] = _Graph(self._learn, reading)
        return self.graphs[shape](reading)

    def _learn(self, reading: Reading) -> Tensor:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        device_type = "cuda" if self.is_cuda else "cpu"
        with (
            equal_images(self.reader.model),
            torch.autocast(device_type, torch.bfloat16, enabled=self.is_cuda),
        ):
            loss = self.loss(*reading)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return loss.detach()

    def accuracy(self, questions: list[ChartQuestion]) -> float:
        """Relaxed accuracy on some questions, by greedy decoding."""
        self.reader.model.eval()
        right = 0.0
        for start in range(0, len(questions), 64):
            part = questions[start : start + 64]
            answers = self.reader.answer([q.image for q in part], [q.text for q in part])
            right += sum(relaxed_accuracy(a, q.answers) for a, q in zip(answers, part, strict=True))
        self.reader.model.train()
        return right / len(questions)


def train(settings: Settings) -> ChartReader:
    """Train until the steps or the minutes are over, writing progress and checkpoints."""
    settings.state.mkdir(parents=True, exist_ok=True)
    run = Run(settings)
    held_out = generated_questions(settings.eval_questions)
    feed = Feed(settings, run.next_seed)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    run.reader.model.train()
    with Progress(*columns) as progress:
        task = progress.add_task("starting", total=1.0)
        last, losses = time.monotonic(), deque[Tensor](maxlen=50)
        for reading in feed:
            losses.append(run.learn(reading))
            now = time.monotonic()
            run.seconds, last = run.seconds + now - last, now
            is_over = run.done >= 1
            if run.step % 50 == 0 or is_over:
                loss = loss_of(losses)
                rate = run.step / run.seconds
                text = f"step {run.step}  loss {loss:.3f}  {rate:.2f} steps/s"
                progress.update(task, description=text, completed=min(1.0, run.done))
            if run.step % settings.eval_every == 0 or is_over:
                accuracy = run.accuracy(held_out)
                run.save(feed.next_seed)
                note(settings, run, {"loss": loss_of(losses), "relaxed_accuracy": accuracy})
                progress.console.print(
                    f"step {run.step}  {run.seconds:.0f} s  loss {loss_of(losses):.3f}  "
                    f"relaxed accuracy {accuracy:.1%}"
                )
            if is_over:
                break
    feed.close()
    return run.reader


def loss_of(losses: deque[Tensor]) -> float:
    return float(torch.stack(list(losses)).mean())


def note(settings: Settings, run: Run, values: dict[str, float]) -> None:
    """Append one record of progress."""
    case: dict[str, Scalar] = {
        "step": run.step,
        "batch": settings.batch,
        "kinds": " ".join(settings.kinds),
    }
    record = Measurement(
        op="train_chart_reader",
        impl="transformers",
        case=case,
        values={**values, "train_s": run.seconds},
        machine=machine(settings.device),
        command="python scripts/train_chart_reader.py",
    )
    store.append(settings.state / "progress.jsonl", [record])


def machine(device: str) -> Machine:
    is_cuda = device.startswith("cuda")
    gpu = torch.cuda.get_device_name(device) if is_cuda else None
    capability = torch.cuda.get_device_capability(device) if is_cuda else None
    return Machine.current(gpu=gpu, capability=capability)


def finish(settings: Settings, reader: ChartReader) -> Measurement:
    """Write the reader's files and a record of the accuracy that they have once loaded again."""
    size = save_chart_reader(reader, settings.output)
    loaded = load_chart_reader(settings.output).to(settings.device)
    loaded.name = "chart reader"  # as it is called where it is shipped
    questions = generated_questions(settings.final_questions)
    rows = [Row("bf16")]
    command = "python scripts/train_chart_reader.py"
    record = evaluate(loaded, questions, rows, data="generated", command=command)[0]
    record = replace(record, values={**record.values, "weights_bytes": size})
    store.append(settings.output / "record.jsonl", [record])
    return record


def parse(arguments: list[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--minutes", type=float, default=8.0, help="of training, at most")
    parser.add_argument("--steps", type=int, default=10**6, help="at most")
    parser.add_argument("--batch", type=int, default=256, help="images in a step")
    parser.add_argument("--reuse", type=int, default=4, help="readings of each image")
    parser.add_argument("--workers", type=int, default=15, help="processes that draw")
    parser.add_argument("--device", default=device)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the reader")
    parser.add_argument("--state", type=Path, default=Path("build/chart_reader"), help="folder")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--eval-questions", type=int, default=256)
    parser.add_argument("--eval-every", type=int, default=1000, help="steps")
    parser.add_argument("--final-questions", type=int, default=1000)
    parser.add_argument("--start", type=Path, help="folder of a reader that learns on")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="of batches: others, other charts"
    )
    given = vars(parser.parse_args(arguments))
    given["kinds"] = tuple(given["kinds"])
    return Settings(**given)


def main() -> None:
    settings = parse()
    use_float32_products()  # BF16 is slow on CPUs without instructions for it
    record = finish(settings, train(settings))
    print(record.to_json())


if __name__ == "__main__":
    main()
