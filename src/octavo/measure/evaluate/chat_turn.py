"""One turn of a chat in the engine, with each recipe: the answers, and where they part."""

from collections.abc import Callable, Sequence
from itertools import takewhile

from octavo.integrations.transformers.text_model import TextModel
from octavo.integrations.transformers.tokenizer import chat_tokens
from octavo.measure.evaluate.answering import stop_tokens
from octavo.measure.evaluate.perplexity import machine_of
from octavo.measure.evaluate.perplexity_rows import RecipeRow
from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table
from octavo.serving.engine.llm import LLM
from octavo.serving.engine.request import Sampling
from octavo.serving.engine.settings import EngineSettings

OP = "texts"


def chat_turn(
    text_model: TextModel,
    question: str,
    rows: Sequence[RecipeRow],
    *,
    max_tokens: int,
    command: str,
    on_row: Callable[[Measurement], None] = lambda record: None,
) -> list[Measurement]:
    """A model's greedy answer to one question with each row's recipe, as records.

    num_same_tokens: up to where an answer is the first row's. The model is left as it came.
    """
    tokens = chat_tokens(text_model.tokenizer, [{"role": "user", "content": question}])
    stop = tuple(sorted(stop_tokens(text_model)))
    sampling = Sampling(temperature=0, max_tokens=max_tokens, stop_token_ids=stop)
    num_pages = -(-(len(tokens) + max_tokens) // EngineSettings().page_size) + 1
    first: tuple[int, ...] | None = None
    records = []
    for row in rows:
        settings = EngineSettings(max_num_seqs=1, num_pages=num_pages)
        with LLM(text_model.model, recipe=row.recipe, settings=settings) as llm:
            (answer,) = llm.generate([tokens], sampling)
        text = text_model.tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
        values = {"num_tokens": len(answer.tokens)}
        if first is not None:
            pairs = zip(first, answer.tokens, strict=False)
            values["num_same_tokens"] = sum(1 for _ in takewhile(lambda p: p[0] == p[1], pairs))
        record = Measurement(
            op=OP,
            impl="engine",
            case={
                "model": text_model.name,
                "dtype": text_model.dtype,
                "recipe": row.name,
                "prompt": question,
                "text": text or "(nothing)",
            },
            values=values,
            machine=machine_of(text_model),
            command=command,
            baseline=None if first is None else rows[0].name,
        )
        first = answer.tokens if first is None else first
        records.append(record)
        on_row(record)
    return records


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
                _whole(record.values.get("num_same_tokens")),
            )
            for record in records
        ),
    )


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)
