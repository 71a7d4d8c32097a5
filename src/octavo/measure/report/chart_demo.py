"""What the chart reader answered in BF16 and FP8, as a section of a page."""

from collections.abc import Mapping, Sequence

from octavo.measure.records import Measurement
from octavo.measure.report.html import Picture, Section
from octavo.measure.report.plots import bars
from octavo.measure.report.tables import Table

_ACCURACY = "relaxed_accuracy_percent"


def reading_section(
    records: Sequence[Measurement],
    table: Table,
    pictures: Sequence[Picture],
    num_changed: Mapping[str, int],
) -> Section:
    """The accuracy of each recipe, what it means in words, and some of the charts.

    num_changed: how many answers of a recipe are other words than the first one's.
    """
    first, *others = records
    sentences = [_sentence(record, num_changed) for record in others]
    return Section(
        title="Charts read in BF16 and in FP8",
        text=f"A Qwen3-VL of five million parameters, which comes with octavo, answered "
        f"{first.case['num_questions']} questions about charts that it was not trained on: first "
        f"as it is ({first.values[_ACCURACY]:.1f} % right), then with the attention of its vision "
        "tower in FP8. Right is a number within 5 % or the same word (relaxed accuracy).\n\n"
        + " ".join(sentences)
        + "\n\nDynamic scales follow the charts that are read. Static ones were found before, on "
        "charts with other colours, sizes, fonts and paper: if scales only served the data that "
        "they were found on, FP8 static would be worse. An interval that has 0 in it means that "
        "these questions cannot tell the two recipes apart. Below are charts with the truth and "
        "every answer: some whose answers differ between recipes, if there are any, and others.",
        figures=(
            bars(
                records,
                caption="Questions answered right; higher is better",
                x="recipe",
                y=_ACCURACY,
                series="model",
            ),
        ),
        tables=(table,),
        pictures=tuple(pictures),
    )


def _sentence(record: Measurement, num_changed: Mapping[str, int]) -> str:
    values, recipe = record.values, str(record.case["recipe"])
    low, high = values["difference_low_points"], values["difference_high_points"]
    verdict = (
        f"it differs from {record.baseline}"
        if values["is_different"]
        else f"no difference from {record.baseline} that these questions could show"
    )
    changed = num_changed.get(recipe, 0)
    return (
        f"{recipe}: {values[_ACCURACY]:.1f} % right, {values['difference_points']:+.1f} points "
        f"(95 % interval {low:+.1f} to {high:+.1f}), {verdict}; {changed} of "
        f"{record.case['num_questions']} answers are other words."
    )
