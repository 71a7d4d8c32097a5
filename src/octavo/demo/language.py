"""SmolLM2 in the demonstration: what FP8 does to its attention, its predictions and its answers."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from octavo.atomic import write_atomically
from octavo.demo.attention_errors import (
    Error,
    accumulation_errors,
    attention_errors,
    decode_errors,
    quantization_errors,
)
from octavo.demo.stage import Sizes, Stage, one_thread
from octavo.integrations.transformers.calibrate import capture_qkv
from octavo.integrations.transformers.text_model import SMALL_MODEL, TextModel
from octavo.integrations.transformers.tokenizer import chat_tokens
from octavo.measure import store
from octavo.measure.evaluate import needle, perplexity
from octavo.measure.evaluate.answering import stop_tokens
from octavo.measure.evaluate.language import local_rows, machine_of
from octavo.measure.evaluate.requests import (
    BASELINE,
    LanguageRequest,
    NeedleRequest,
    PerplexityRequest,
)
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.layers import ERRORS
from octavo.measure.report.quality import needle_table
from octavo.measure.report.tables import Table
from octavo.measure.rows import Row
from octavo.measure.run import (
    Outcome,
    Participant,
    Progress,
    Records,
    Watch,
    ready,
    run_whole,
)
from octavo.serving.engine.llm import LLM
from octavo.serving.engine.request import Sampling
from octavo.serving.engine.settings import EngineSettings

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
            Stage(f"{SMALL_MODEL}: the error of FP8 in its attention", self._errors, _errors_told),
            Stage(
                f"{SMALL_MODEL}: perplexity, {sizes.num_windows} × {sizes.context} tokens",
                self._perplexity,
                lambda records: [perplexity.perplexity_table(records)],
            ),
            Stage(
                f"{SMALL_MODEL}: a needle in up to {longest} tokens",
                self._needle,
                lambda records: [needle_table(records)],
            ),
            Stage(f"{SMALL_MODEL}: a chat", self._chat, lambda records: [chat_table(records)]),
        ]

    def _errors(self, watch: Watch) -> list[Measurement]:
        layers, machine = self.sizes.layers, Machine.current()
        total = 3 * len(layers) + 2
        watch("reading", 0, total)
        ids = self.text_model.first_window(self.text, 1024)[None]
        captured = capture_qkv(self.text_model.model, ids, layers)
        errors: list[Error] = []
        measures = (quantization_errors, attention_errors, decode_errors)
        for number, measure in enumerate(measures):
            for place, layer in enumerate(layers, 1):
                errors += measure(layer, captured[layer])
                watch(f"layer {layer}", number * len(layers) + place, total)
        about = {"model": self.text_model.name}
        errors = [replace(error, case={**about, **error.case}) for error in errors]
        errors += accumulation_errors(self.sizes.key_counts)  # of no model
        watch("accumulating", total, total)
        found = [
            Measurement(
                impl="reference",
                machine=machine,
                command=self.command,
                baseline=None if error.op == "quantize_error" else "float64",
                **vars(error),
            )
            for error in errors
        ]
        store.append(self.records, found)
        return found

    def _perplexity(self, watch: Watch) -> list[Measurement]:
        path = self.records.parent / TEXT
        write_atomically(path, self.text.encode())
        request = PerplexityRequest(
            data=path,
            context=self.sizes.context,
            chunk=self.sizes.chunk,
            num_windows=self.sizes.num_windows,
            recipe=PERPLEXITY_ROWS,
            calibration_windows=1,
        )
        return perplexity.run(request, self.records, watch, text_model=self.text_model)

    def _needle(self, watch: Watch) -> list[Measurement]:
        lengths = ",".join(map(str, self.sizes.needle_lengths))
        request = NeedleRequest(
            lengths=lengths, depths="0.5", repetitions=1, model=SMALL_MODEL, recipe=ROWS, num_keys=1
        )
        return needle.run(request, self.records, watch, text_model=self.text_model)

    def _chat(self, watch: Watch) -> list[Measurement]:
        request = LanguageRequest(recipe=ROWS)
        rows = [row for _, row in local_rows(request, self.text_model, {})]
        progress = Progress(watch, "answering", len(rows))

        def keep(record: Measurement) -> None:
            store.append(self.records, [record])
            progress.add()

        progress.add(0)
        with one_thread():
            return chat_turn(
                self.text_model,
                QUESTION,
                rows,
                max_tokens=self.sizes.answer_tokens,
                command=self.command,
                records=Records(on_record=keep),
            )


def _errors_told(records: Sequence[Measurement]) -> list[Table | str]:
    """The tables of the report's sections, without its texts."""
    by_kind = ((kind, [row for row in records if row.op in kind.ops]) for kind in ERRORS)
    return [table for kind, own in by_kind for made in kind.make(own) for table in made.tables]


def chat_turn(
    text_model: TextModel,
    question: str,
    rows: Sequence[Row],
    *,
    max_tokens: int,
    command: str,
    records: Records | None = None,
) -> list[Measurement]:
    """A model's greedy answer to one question in the engine, with each row's recipe, as records.

    num_same_tokens: up to where an answer is the first row's. The model is left as it came.
    """
    tokens = chat_tokens(text_model.tokenizer, [{"role": "user", "content": question}])
    stop = tuple(sorted(stop_tokens(text_model)))
    sampling = Sampling(temperature=0, max_tokens=max_tokens, stop_token_ids=stop)
    num_pages = -(-(len(tokens) + max_tokens) // EngineSettings().page_size) + 1
    answers: list[tuple[int, ...]] = []  # of the rows so far

    def measure(row: Row) -> Outcome:
        settings = EngineSettings(max_num_seqs=1, num_pages=num_pages)
        with LLM(text_model.model, recipe=row.recipe(), settings=settings) as llm:
            (answer,) = llm.generate([tokens], sampling)
        text = text_model.tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
        values = {"num_tokens": len(answer.tokens)}
        if answers:
            pairs = zip(answers[0], answer.tokens, strict=False)
            values["num_same_tokens"] = sum(1 for _ in takewhile(lambda p: p[0] == p[1], pairs))
        answers.append(answer.tokens)
        return Outcome(values, {"text": text or "(nothing)"})

    participants = [
        Participant(
            name=row.name,
            impl="engine",
            about={"model": text_model.name, "dtype": text_model.dtype},
            machine=machine_of(text_model.model),
            open=ready(row),
        )
        for row in rows
    ]
    about = {"prompt": question}
    return run_whole(participants, measure, records, op="texts", command=command, about=about)


def chat_table(records: Sequence[Measurement]) -> Table:
    """What each row answered."""
    return Table(
        caption=f"chat: {records[0].case['model']}: {records[0].case['prompt']}",
        header=("recipe", "answer", "tokens", "the same"),
        rows=tuple(
            (
                str(record.case["recipe"]),
                str(record.case["text"]),
                int(record.values["num_tokens"]),
                int(record.values["num_same_tokens"]) if record.baseline else None,
            )
            for record in records
        ),
    )
