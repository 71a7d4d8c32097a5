"""What FP8 does to answers as sections of a page: beside BF16, with errors and recovery."""

from collections.abc import Sequence
from dataclasses import replace

from octavo.measure.records import Measurement
from octavo.measure.report.filled import filled_table
from octavo.measure.report.html import Section, Sheet
from octavo.measure.report.needle import needle_section
from octavo.measure.report.pictures import NAME, PROBLEM, is_picture_url
from octavo.measure.report.plots import Figure
from octavo.measure.report.points import Point, points
from octavo.measure.report.select import Key, grouped, machine_name, newest

_WINDOWS = ("dtype", "data", "context", "chunk", "count", "num_windows", "command")
_RECOVERY = "recovery_percent"


def perplexity_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine and model of `octavo eval perplexity`."""
    sections = []
    for (machine, model), own in grouped(records, "model").items():
        rows: list[Measurement] = []
        series: dict[str, list[Point]] = {}
        for runs in grouped(own, *_WINDOWS).values():
            some = newest(runs, "recipe")
            rows += some
            about = some[0].case
            for row in some:
                if _RECOVERY in row.values:
                    name = (
                        f"{int(about['context']):,} tokens, {about['chunk']} at once, against "
                        f"{row.baseline}"
                    )
                    error = row.values.get("recovery_standard_error_percent", 0.0)
                    point = Point(str(row.case["recipe"]), row.values[_RECOVERY], error, error)
                    series.setdefault(name, []).append(point)
        caption = (
            "Recovery of each recipe: the baseline's perplexity over its own; 100 % is as good as "
            "the baseline. Bars are one standard error over the windows of text."
        )
        figures: tuple[Figure, ...] = ()
        if series:
            figures = (points(series, caption=caption, value_title="recovery (%)"),)
        columns = (
            *("data", "context", "chunk", "num_windows", "recipe", "perplexity"),
            *("perplexity_standard_error", "perplexity_ratio", _RECOVERY),
            *("recovery_standard_error_percent",),
        )
        sections.append(
            Section(
                title=f"Perplexity: {model}, {machine}",
                text="Real text in windows of the context's length; a chunk is how many tokens "
                "enter the cache at once. A recipe is compared with the baseline on the same "
                "windows, so that its standard error is much smaller than that of the perplexity.",
                headline=recovery_headline(str(model), "perplexity", rows),
                figures=figures,
                tables=(filled_table(rows, caption="Perplexity, by recipe", columns=columns),),
            )
        )
    return sections


def chartqa_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine, model and set of questions of `octavo eval chartqa`."""
    names = ("model", "data", "num_questions")
    return [_chartqa(key, own) for key, own in grouped(records, *names).items()]


def _chartqa(key: Key, records: Sequence[Measurement]) -> Section:
    machine, model, data, num_questions = key
    rows = newest(records, "recipe")
    compared = [
        Point(
            str(row.case["recipe"]),
            row.values["difference_points"],
            row.values["difference_high_points"] - row.values["difference_points"],
            row.values["difference_points"] - row.values["difference_low_points"],
        )
        for row in rows
        if "difference_points" in row.values
    ]
    figures: tuple[Figure, ...] = ()
    if compared:
        figures = (
            points(
                {"difference": compared},
                caption="Relaxed accuracy of each recipe less that of the baseline; at 0 both are "
                "right as often. Bars are intervals of 95 %.",
                value_title="difference (points)",
            ),
        )
    columns = (
        *("recipe", "relaxed_accuracy_percent", "exact_match_percent", _RECOVERY),
        *("difference_points", "difference_low_points", "difference_high_points"),
    )
    return Section(
        title=f"Questions about charts: {model}, {data}, {machine}",
        text=f"{num_questions} questions. Relaxed accuracy: a number within 5 %, or the same word. "
        "A difference whose interval has 0 in it is none that these questions could show."
        + _unseen_charts(rows),
        headline=recovery_headline(str(model), "chart questions", rows),
        figures=figures,
        tables=(filled_table(rows, caption="Charts, by recipe", columns=columns),),
        sheets=_chart_sheets(rows),
    )


def _chart_sheets(rows: Sequence[Measurement]) -> tuple[Sheet, ...]:
    """Pictures of charts that records have as data URLs (`with_pictures`), each once."""
    names = ", ".join(dict.fromkeys(str(row.case["recipe"]) for row in rows))
    about = "Charts with a question, the truth and the answers of"
    urls = dict.fromkeys(str(row.case[NAME]) for row in rows if is_picture_url(row.case.get(NAME)))
    return tuple(
        Sheet(
            caption=f"{about} {names}; first those that recipes answer differently, if there are "
            "any.",
            alt=f"{about} {names}",
            url=url,
        )
        for url in urls
    )


def _unseen_charts(rows: Sequence[Measurement]) -> str:
    """Why a picture that records name is not shown."""
    found = dict.fromkeys(
        f" The picture {row.case[NAME]} is not shown: {row.case[PROBLEM]}."
        for row in rows
        if PROBLEM in row.case
    )
    return "".join(found)


def needle_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section with heat maps for each machine, model, haystack and number of repetitions."""
    sections = []
    for (machine, *_), own in grouped(records, "model", "haystack", "repetitions").items():
        rows = newest(own, "recipe", "length", "depth")
        section = needle_section(rows)
        lines = [
            f"{row[0]} {row[-1]:.1f} %"
            for row in section.tables[0].rows
            if isinstance(row[-1], float)
        ]
        headline = f"{rows[0].case['model']}: needles recovered: {', '.join(lines)}."
        sections.append(
            replace(
                section,
                title=f"{section.title}, {machine}",
                headline=headline if lines else "",
            )
        )
    return sections


def mrcr_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine, model and data set of `octavo eval mrcr`."""
    sections = []
    for (machine, model, data, num), own in grouped(
        records, "model", "data", "num_needles"
    ).items():
        rows = newest(own, "recipe", "bucket")
        series: dict[str, list[Point]] = {}
        for row in rows:
            error = row.values.get("score_standard_error_percent", 0.0)
            point = Point(f"{row.case['bucket']}", row.values["score_percent"], error, error)
            series.setdefault(str(row.case["recipe"]), []).append(point)
        columns = (
            *("recipe", "bucket", "num_questions", "score_percent"),
            *("score_standard_error_percent", "auc_percent", _RECOVERY),
        )
        sections.append(
            Section(
                title=f"Long conversations (MRCR): {model}, {data}, {machine}",
                text=f"Conversations with {num} needles that read alike, in buckets by tokens.",
                headline=recovery_headline(
                    str(model), "MRCR", [row for row in rows if row.case["bucket"] == "all"]
                ),
                figures=(
                    points(
                        series,
                        caption="Score by the longest conversation of a bucket, in tokens; "
                        "higher is better. Bars are one standard error.",
                        value_title="score (%)",
                    ),
                ),
                tables=(filled_table(rows, caption="MRCR, by recipe", columns=columns),),
            )
        )
    return sections


def recovery_headline(model: str, what: str, rows: Sequence[Measurement]) -> str:
    """What the rows recover, in one sentence: the least and the most of them; "" if none does."""
    found = sorted(
        (r.values[_RECOVERY], str(r.case["recipe"])) for r in rows if _RECOVERY in r.values
    )
    if not found:
        return ""
    (low, worst), (high, best) = found[0], found[-1]
    first = machine_name(rows[0])
    if len(found) == 1:
        return f"{model}, {what}: {worst} recovers {low:.1f} % ({first})."
    return (
        f"{model}, {what}: recipes recover {low:.1f} % ({worst}) to {high:.1f} % ({best}), {first}."
    )
