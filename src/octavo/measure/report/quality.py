"""What FP8 does to answers, beside BF16: scores, their errors, and what is recovered."""

import math
import statistics
from functools import partial

from octavo.measure.records import Measurement
from octavo.measure.report.plots import Figure, axes, heat_map
from octavo.measure.report.sections import Kind, Rows, dots, either_side
from octavo.measure.report.shift import advised, shift_headline
from octavo.measure.report.tables import Cell, Table, grouped, newest, tokens_text

# From lost to found: told apart without colors by their lightness, and by the numbers in them.
COLORS = [[0.0, "#7f1d1d"], [0.5, "#f2c14e"], [1.0, "#2a9d8f"]]
_RECOVERY, _RECOVERY_ERROR = "recovery_percent", "recovery_standard_error_percent"
_SCORE, _SCORE_ERROR = "score_percent", "score_standard_error_percent"
_score_dots = partial(dots, _SCORE, reach=either_side(_SCORE_ERROR))
_recovery_dots = partial(
    dots,
    _RECOVERY,
    title="recovery (%)",
    reach=either_side(_RECOVERY_ERROR),
    reference=100.0,
)
_PASS_WORDS = {"choice": "Multiple choice", "math": "Mathematics", "code": "Programming"}


_SAME_WINDOWS = ("dtype", "data", "context", "chunk", "count", "num_windows", "command")
PERPLEXITY = Kind(
    ops=("perplexity",),
    needs="model recipe perplexity context chunk",
    # Those of each run over text, one run after the other.
    rows=lambda records: [
        row for run in grouped(records, *_SAME_WINDOWS).values() for row in newest(run, "recipe")
    ],
    title="Perplexity: {model}",
    text="Real text in windows of the context's length; a chunk is how many tokens enter the cache "
    "at once. A recipe is compared with the baseline on the same windows, so that its standard "
    "error is much smaller than that of the perplexity.",
    figures=_recovery_dots(
        caption="Recovery of each recipe: the baseline's perplexity over its own; 100 % is as good "
        "as the baseline. Bars are one standard error over the windows of text.",
        series=lambda row: (
            f"{int(row.case['context']):,} tokens, {row.case['chunk']} at once, against "
            f"{row.baseline}"
        ),
    ),
    caption="Perplexity, by recipe",
    columns="data context chunk num_windows recipe perplexity perplexity_standard_error "
    f"perplexity_ratio {_RECOVERY} {_RECOVERY_ERROR}",
)


MRCR = Kind(
    ops=("mrcr",),
    needs="model data recipe bucket num_needles score_percent",
    by="model data num_needles",
    rows="recipe bucket",
    title="Long conversations (MRCR): {model}, {data}",
    text="Conversations with {num_needles} needles that read alike, in buckets by tokens.",
    headline=shift_headline,
    figures=_score_dots(
        caption="Score by the longest conversation of a bucket, in tokens; higher is better. Bars "
        "are one standard error.",
        title="score (%)",
        name="bucket",
        series=lambda row: str(row.case["recipe"]),
    ),
    caption="MRCR, by recipe",
    columns=f"recipe bucket num_questions {_SCORE} {_SCORE_ERROR} auc_percent {_RECOVERY}",
)


def _asked(rows: Rows) -> str:
    """How many questions were asked how often, and how answers were drawn."""
    num_questions, repetitions, temperature = map(
        rows[0].get, ("num_questions", "repetitions", "temperature")
    )
    drawn = "" if temperature is None else f", temperature {temperature:g}"
    return f"{num_questions:,.0f} questions × {repetitions}{drawn}"


def _pass_title(rows: Rows) -> str:
    first = rows[0]
    data = ", ".join(str(x) for x in map(first.get, ("data", "subset", "split")) if x is not None)
    about = f"{_PASS_WORDS[first.op]}: {first.get('model')}, {data}"
    return f"{about}, {_asked(rows)}"


def _first(rows: Rows) -> str:
    return next(row.baseline for row in rows if _RECOVERY in row.values) or "the first"


_PASS_FIGURES = (
    _score_dots(
        caption="pass@1 of each recipe: the share of right answers; higher is better. Bars are one "
        "standard error over questions and repetitions.",
        title="pass@1 (%)",
        series=lambda row: "pass@1",
    ),
    _recovery_dots(
        caption=lambda rows: (
            f"Recovery of each recipe: its pass@1 in that of {_first(rows)}, of the same "
            "questions; 100 % is as good. Bars are one standard error."
        ),
        series=lambda row: "recovery",
    ),
)
PASS_AT_1 = Kind(
    ops=("choice", "code", "math"),
    needs="model data recipe score_percent num_questions repetitions",
    by="op model data subset split num_questions repetitions temperature max_tokens",
    rows="recipe",
    title=_pass_title,
    text=lambda rows: (
        f"{_asked(rows)}. pass@1 is how often a question is answered rightly, as the mean over "
        "questions. Its standard error is that over other questions and repetitions; that of "
        "repetitions is over the same questions alone. What a row recovers is compared question "
        "by question, so that its standard error is smaller. Unparsed are answers without one "
        "that could be read, cut those that reached the limit of tokens."
    ),
    headline=shift_headline,
    figures=lambda rows: [figure for figures in _PASS_FIGURES for figure in figures(rows)],
    caption=lambda rows: f"{_PASS_WORDS[rows[0].op]}, by recipe",
    columns=f"recipe {_SCORE} {_SCORE_ERROR} repetition_standard_error_percent {_RECOVERY} "
    f"{_RECOVERY_ERROR} difference_percent difference_standard_error_percent num_answers "
    "num_unparsed num_cut mean_answer_tokens",
    heads={_SCORE: "pass@1 (%)"},
)

TASKS = Kind(
    ops=("tasks",),
    needs="model data recipe bucket score_percent num_questions",
    by="model data limit is_chat",
    rows="recipe bucket",
    title="lm-eval: {model}, {data}",
    text="Tasks of the lm-evaluation-harness, asked and judged by it; `all` is the mean over tasks "
    "or the only one. Rows are compared question by question.",
    headline=shift_headline,
    figures=_recovery_dots(
        caption="Recovery of each recipe by task: its score in that of the first row; 100 % is as "
        "good. Bars are one standard error.",
        name="bucket",
        series=lambda row: str(row.case["recipe"]),
    ),
    caption="lm-eval, by recipe and task",
    columns=f"recipe bucket metric num_questions {_SCORE} {_SCORE_ERROR} {_RECOVERY} "
    f"{_RECOVERY_ERROR} difference_percent difference_standard_error_percent",
    heads={"bucket": "task"},
)

TEXTS = Kind(
    ops=("texts",),
    needs="model recipe prompt text",
    rows="prompt recipe",
    title="Texts: {model}",
    text="The same prompts, answered with each recipe.",
    caption="Texts, by prompt and recipe",
    columns="prompt recipe text",
)


def needle_table(records: Rows) -> Table:
    """One row for each recipe: needles found by length, over all depths, and what is recovered."""
    lengths = sorted({int(record.case["length"]) for record in records})
    by_name = _by_recipe(records)
    first = records[0].case
    depths = len({record.case["depth"] for record in records})
    rows: list[tuple[Cell, ...]] = []
    base = 0.0
    for name, own in by_name.items():
        found = {
            n: [r.values["found_percent"] for r in own if r.case["length"] == n] for n in lengths
        }
        shares = [statistics.fmean(some) if some else None for some in found.values()]
        whole = statistics.fmean(record.values["found_percent"] for record in own)
        recovered = 100 * whole / base if base else None
        base = base if rows else whole  # the first row is what the others are compared with
        rows.append((name, *shares, whole, _standard_error(own), recovered))
    caption = (
        f"needles found (%): {first['model']}, {first['haystack']}, depths: {depths}, "
        f"repetitions: {first['repetitions']}"
    )
    header = ("recipe", *map(tokens_text, lengths), "all", "± s.e.", "recovery (%)")
    return Table(caption=caption, header=header, rows=tuple(rows))


def needle_figures(records: Rows) -> tuple[Figure, ...]:
    """A heat map for each row that finds more at some places than at others."""
    return tuple(_heat_map(name, own) for name, own in _by_recipe(records).items() if _varies(own))


def _varies(records: Rows) -> bool:
    return len({record.values["found_percent"] for record in records}) > 1


def _needle_text(records: Rows) -> str:
    same = [
        f"{name} finds {own[0].values['found_percent']:.0f} % at every length and depth."
        for name, own in _by_recipe(records).items()
        if not _varies(own)
    ]
    return (
        "Every prompt has keys with values, and asks for the value of one of them, the needle. A "
        "cell is how many needles a row finds, by the tokens of the prompt and the needle's place "
        f"in it, from the start (0 %) to the end (100 %). {' '.join(same)}"
    )


NEEDLE = Kind(
    ops=("needle",),
    needs="model haystack recipe length depth repetitions found_percent",
    by="model haystack repetitions",
    rows="recipe length depth",
    title="Needles in a haystack: {model}",
    text=_needle_text,
    headline=shift_headline,
    figures=needle_figures,
    tables=lambda rows: [advised(needle_table(rows), rows)],
)


def _heat_map(name: str, records: Rows) -> Figure:
    lengths = sorted({int(record.case["length"]) for record in records})
    depths = sorted({float(record.case["depth"]) for record in records})
    found = {
        (int(r.case["length"]), float(r.case["depth"])): r.values["found_percent"] for r in records
    }
    cells = [[found.get((length, depth)) for length in lengths] for depth in depths]
    trace = heat_map(
        [tokens_text(length) for length in lengths],
        [f"{100 * depth:g}" for depth in depths],
        cells,
        colors=COLORS,
        span=(0, 100),
        title="found (%)",
        texttemplate="%{z:.0f}",
        hovertemplate="%{x} tokens, depth %{y} %: %{z:.0f} % found",
    )
    layout = axes("tokens of the prompt", "depth of the needle (%)")
    layout["xaxis"]["type"] = "category"
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    lost = sorted({length for (length, _), share in found.items() if share < 50})
    where = f"most are lost at {', '.join(map(tokens_text, lost))} tokens, at one depth or more"
    return Figure(
        caption=f"{name}: {where if lost else 'most are found at all lengths and depths'}",
        data=(trace,),
        layout=layout,
    )


def _by_recipe(records: Rows) -> dict[str, list[Measurement]]:
    return {str(recipe): own for (_, recipe), own in grouped(records, "recipe").items()}


def _standard_error(records: Rows) -> float | None:
    """Of the mean over all prompts, each found or not."""
    count = sum(int(record.case["repetitions"]) for record in records)
    share = sum(record.values["num_found"] for record in records) / count
    return None if count < 2 else 100 * math.sqrt(share * (1 - share) / (count - 1))
