"""Answers as sections of a page: pass@1 of choice and mathematics, and texts of a few prompts."""

from collections.abc import Sequence
from dataclasses import replace

from octavo.measure.records import Measurement
from octavo.measure.report.accuracy import recovery_headline
from octavo.measure.report.filled import filled_table
from octavo.measure.report.html import Section
from octavo.measure.report.plots import Figure
from octavo.measure.report.points import Point, points
from octavo.measure.report.select import Key, grouped, newest
from octavo.measure.report.tables import Table

WORDS = {"choice": "Multiple choice", "math": "Mathematics"}
_SAME = (
    *("op", "model", "data", "subset", "split", "num_questions", "repetitions", "temperature"),
    "max_tokens",
)
_COLUMNS = (
    *("recipe", "score_percent", "score_standard_error_percent"),
    *("repetition_standard_error_percent", "recovery_percent", "recovery_standard_error_percent"),
    *("difference_percent", "difference_standard_error_percent", "num_answers", "num_unparsed"),
    *("num_cut", "mean_answer_tokens"),
)


def pass_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine, model and set of questions of `octavo eval choice` and `math`."""
    return [_section(key, newest(own, "recipe")) for key, own in grouped(records, *_SAME).items()]


def _section(key: Key, rows: Sequence[Measurement]) -> Section:
    machine, op, model, *data, num_questions, repetitions, temperature, _ = key
    name = ", ".join(str(part) for part in data if part is not None)
    what = WORDS[str(op)]
    asked = f"{num_questions:,.0f} questions × {repetitions}"
    drawn = "" if temperature is None else f", temperature {temperature:g}"
    text = (
        f"{asked}{drawn}. pass@1 is how often a question is answered rightly, as the mean over "
        "questions. Its standard error is that over other questions and repetitions; that of "
        "repetitions is over the same questions alone. What a row recovers is compared question "
        "by question, so that its standard error is smaller. Unparsed are answers without one "
        "that could be read, cut those that reached the limit of tokens."
    )
    return Section(
        title=f"{what}: {model}, {name}, {asked}{drawn}, {machine}",
        text=text,
        headline=recovery_headline(str(model), what.lower(), rows),
        figures=_figures(rows),
        tables=(_table(rows, f"{what}, by recipe"),),
    )


def _table(rows: Sequence[Measurement], caption: str) -> Table:
    table = filled_table(rows, caption=caption, columns=_COLUMNS)
    heads = ("pass@1 (%)" if head == "score (%)" else head for head in table.header)
    return replace(table, header=tuple(heads))


def _figures(rows: Sequence[Measurement]) -> tuple[Figure, ...]:
    scores = _points(rows, "score_percent", "score_standard_error_percent")
    found = [
        points(
            {"pass@1": scores},
            caption="pass@1 of each recipe: the share of right answers; higher is better. Bars are "
            "one standard error over questions and repetitions.",
            value_title="pass@1 (%)",
        )
    ]
    recovered = _points(rows, "recovery_percent", "recovery_standard_error_percent")
    if recovered:
        first = (
            next(row.baseline for row in rows if "recovery_percent" in row.values) or "the first"
        )
        found.append(
            points(
                {"recovery": recovered},
                caption=f"Recovery of each recipe: its pass@1 in that of {first}, of the same "
                "questions; 100 % is as good. Bars are one standard error.",
                value_title="recovery (%)",
            )
        )
    return tuple(found)


def _points(rows: Sequence[Measurement], value: str, error: str) -> list[Point]:
    found = []
    for row in rows:
        if value in row.values:
            reach = row.values.get(error, 0.0)
            found.append(Point(str(row.case["recipe"]), row.values[value], reach, reach))
    return found


def texts_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine and model of texts: what each recipe answered to a prompt."""
    return [
        Section(
            title=f"Texts: {model}, {machine}",
            text="The same prompts, answered with each recipe.",
            tables=(
                filled_table(
                    newest(own, "prompt", "recipe"),
                    caption="Texts, by prompt and recipe",
                    columns=("prompt", "recipe", "text"),
                ),
            ),
        )
        for (machine, model), own in grouped(records, "model").items()
    ]
