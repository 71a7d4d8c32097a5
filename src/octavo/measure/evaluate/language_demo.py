"""SmolLM2 in the demonstration: what FP8 does to its attention, its predictions and its answers."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from octavo.atomic import write_atomically
from octavo.integrations.transformers.capture import CapturedQkv, capture_qkv
from octavo.integrations.transformers.small_model import NAME
from octavo.integrations.transformers.text_model import TextModel
from octavo.measure import store
from octavo.measure.evaluate import needle_run, perplexity_run
from octavo.measure.evaluate.accumulation import accumulation_errors
from octavo.measure.evaluate.attention_error import (
    Row,
    attention_errors,
    decode_errors,
    quantization_errors,
)
from octavo.measure.evaluate.chat_turn import chat_table, chat_turn
from octavo.measure.evaluate.demo_stage import Sizes, Stage, Watch, one_thread
from octavo.measure.evaluate.needle import Grid
from octavo.measure.evaluate.perplexity import perplexity_table
from octavo.measure.evaluate.perplexity_rows import BASELINE, recipe_rows
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.layers import error_sections
from octavo.measure.report.quality import needle_table
from octavo.measure.report.tables import Table

QUESTION = "Why do we have seasons? Answer in one sentence."
TEXT = "text.txt"
PERPLEXITY_ROWS = (BASELINE, "tensor", "token")
# The one that needs no calibration.
ROWS = (BASELINE, "token")


class LanguageDemo:
    """Four stages with one model; its records are appended to the file `records`.

    text: what is read; it is written beside the records, for the command that repeats it.
    """

    def __init__(
        self, text_model: TextModel, text: str, records: Path, command: str, sizes: Sizes
    ) -> None:
        self.text_model, self.text, self.records = text_model, text, records
        self.command, self.sizes = command, sizes

    @property
    def stages(self) -> list[Stage]:
        """From single layers to a whole answer."""
        sizes = self.sizes
        longest = f"{max(sizes.needle_lengths):,}"
        return [
            Stage(f"{NAME}: the error of FP8 in its attention", self._errors, _errors_told),
            Stage(
                f"{NAME}: perplexity, {sizes.num_windows} × {sizes.context} tokens",
                self._perplexity,
                lambda records: [perplexity_table(records)],
            ),
            Stage(
                f"{NAME}: a needle in up to {longest} tokens",
                self._needle,
                lambda records: [needle_table(records)],
            ),
            Stage(f"{NAME}: a chat", self._chat, lambda records: [chat_table(records)]),
        ]

    def _errors(self, watch: Watch) -> list[Measurement]:
        layers, machine = self.sizes.layers, Machine.current()
        total = 3 * len(layers) + 2
        watch("reading", 0, total)
        ids = self.text_model.first_window(self.text, 1024)[None]
        captured = capture_qkv(self.text_model.model, ids, layers)

        def row(*, case: Any, **fields: Any) -> Measurement:
            about = {"model": self.text_model.name, **case}
            return Measurement(case=about, machine=machine, command=self.command, **fields)

        def no_model(**fields: Any) -> Measurement:
            return Measurement(machine=machine, command=self.command, **fields)

        found: list[Measurement] = []
        measures: tuple[Callable[[int, CapturedQkv, Row], Iterable[Measurement]], ...]
        measures = (quantization_errors, attention_errors, decode_errors)
        for number, measure in enumerate(measures):
            for place, layer in enumerate(layers, 1):
                found += measure(layer, captured[layer], row)
                watch(f"layer {layer}", number * len(layers) + place, total)
        found += accumulation_errors(list(self.sizes.key_counts), no_model)
        watch("accumulating", total, total)
        store.append(self.records, found)
        return found

    def _perplexity(self, watch: Watch) -> list[Measurement]:
        path = self.records.parent / TEXT
        write_atomically(path, self.text.encode())
        request = perplexity_run.Request(
            data=path,
            context=self.sizes.context,
            chunk=self.sizes.chunk,
            num_windows=self.sizes.num_windows,
            rows=PERPLEXITY_ROWS,
            calibration_windows=1,
        )
        return perplexity_run.run(request, self.records, watch, text_model=self.text_model)

    def _needle(self, watch: Watch) -> list[Measurement]:
        grid = Grid(lengths=self.sizes.needle_lengths, depths=(0.5,), repetitions=1)
        request = needle_run.Request(grid=grid, model=NAME, rows=ROWS, num_keys=1)
        return needle_run.run(request, self.records, watch, text_model=self.text_model)

    def _chat(self, watch: Watch) -> list[Measurement]:
        rows = recipe_rows(ROWS, {}, dtype=self.text_model.dtype)
        num_done = 0

        def keep(record: Measurement) -> None:
            nonlocal num_done
            num_done += 1
            store.append(self.records, [record])
            watch("answering", num_done, len(rows))

        watch("answering", 0, len(rows))
        with one_thread():
            return chat_turn(
                self.text_model,
                QUESTION,
                rows,
                max_tokens=self.sizes.answer_tokens,
                command=self.command,
                on_row=keep,
            )


def _errors_told(records: Sequence[Measurement]) -> list[Table | str]:
    """The tables of the report's sections, without its texts."""
    return [table for section in error_sections(records) for table in section.tables]
