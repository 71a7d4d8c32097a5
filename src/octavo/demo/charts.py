"""Charts made from a seed, and questions about them with their true answers.

A chart here is data: what is shown and how. `octavo.demo.chart_drawing` draws it. Texts
come from a small closed vocabulary, so that a model of a few million parameters can learn to read
them. There are two distributions: "plain", which the chart reader learns and is tested on, and
"noisy", which differs in palette, sizes, layout and background: images to calibrate on.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal, get_args

from octavo.errors import ConfigError

Kind = Literal["bar", "horizontal", "grouped", "line", "pie"]
Distribution = Literal["plain", "noisy"]
Rgb = tuple[int, int, int]

KINDS: tuple[Kind, ...] = get_args(Kind)
# Title -> the labels that such a chart may show; short enough for five of them side by side.
THEMES: dict[str, tuple[str, ...]] = {
    "Fruit sold": ("Apple", "Pear", "Plum", "Fig", "Lemon", "Mango"),
    "Animals seen": ("Cat", "Dog", "Fox", "Owl", "Hen", "Bee"),
    "Rain by city": ("Rome", "Oslo", "Lima", "Bern", "Kyiv", "Cairo"),
    "Sales by month": ("Jan", "Feb", "Mar", "Apr", "May", "Jun"),
}
SERIES = ("North", "South", "East", "West")
COLORS = ("Red", "Blue", "Green", "Orange", "Purple", "Gray")
# Rows of PALETTES have the order of COLORS.
PALETTES: dict[Distribution, tuple[tuple[str, ...], ...]] = {
    "plain": (
        ("#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#803caa", "#7f7f7f"),
        ("#e63c46", "#3c64dc", "#148c50", "#f5961e", "#9650c8", "#969696"),
    ),
    "noisy": (("#aa1432", "#6eaae6", "#96c85a", "#c86e28", "#5a2878", "#5a5f64"),),
}
# Width and height in pixels; multiples of 32, as two patches of 16 make one token.
SIZES: dict[Distribution, tuple[tuple[int, int], ...]] = {
    "plain": ((256, 224), (288, 192), (288, 224)),
    "noisy": ((256, 256), (320, 192), (320, 256)),
}
MAX_VALUES = (9, 20, 50, 99)
MAX_TERM = 20  # sums and differences are asked of charts without larger values


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a chart is drawn."""

    width: int
    height: int
    palette: tuple[str, ...]  # in the order of COLORS
    background: Rgb
    ink: Rgb
    font_px: int
    bar_percent: int  # of a bar's slot
    has_grid: bool
    is_noisy: bool
    seed: int  # of the background's noise


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a chart shows.

    values: one row for each series, one value for each label; all of a chart are different.
    colors: names, one for each label if is_colored_by_label, else one for each series.
    """

    kind: Kind
    title: str
    labels: tuple[str, ...]
    series: tuple[str, ...]  # only grouped charts name them
    values: tuple[tuple[int, ...], ...]
    colors: tuple[str, ...]
    is_colored_by_label: bool
    style: Style

    @property
    def axis_max(self) -> int:
        """Where the axis of values ends: the smallest round number that holds all of them."""
        largest = max(value for row in self.values for value in row)
        return next(top for top in (10, 20, 50, 100) if largest <= top)

    @property
    def named_colors(self) -> list[tuple[str, str]]:
        """Each label or series that has a color of its own, and the color."""
        names = self.labels if self.is_colored_by_label else self.series
        return [pair for pair in zip(names, self.colors, strict=True) if pair[0]]


@dataclass(frozen=True)
class ChartQuestion:
    """A question about a chart, its kind and its true answer."""

    kind: str
    text: str
    answer: str


def make_chart(
    seed: int, distribution: Distribution = "plain", kinds: Sequence[Kind] = KINDS
) -> Chart:
    """The chart of a seed; the same seed gives the same chart everywhere."""
    if distribution not in SIZES:
        raise ConfigError(f"expected one of {', '.join(SIZES)}, got {distribution!r}")
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise ConfigError(f"expected kinds out of {', '.join(KINDS)}, got {list(kinds)}")
    rng = random.Random(f"{distribution} {seed}")  # a text's digest: equal in every Python
    kind = rng.choice(list(kinds))
    title = rng.choice(list(THEMES))
    is_grouped = kind == "grouped"
    num_labels = rng.randint(2, 3) if is_grouped else rng.randint(3, 4 if kind == "pie" else 5)
    labels = tuple(rng.sample(THEMES[title], num_labels))
    series = tuple(rng.sample(SERIES, 2)) if is_grouped else ("",)
    is_colored_by_label = kind == "pie" or (kind in ("bar", "horizontal") and rng.random() < 0.6)
    num_colors = num_labels if is_colored_by_label else len(series)
    values = _values(rng, kind, len(series), num_labels)
    colors = tuple(rng.sample(COLORS, num_colors))
    width, height = rng.choice(SIZES[distribution])
    is_noisy = distribution == "noisy"
    light = rng.randint(225, 245) if is_noisy else rng.randint(246, 255)
    dark = rng.randint(0, 70)
    style = Style(
        width=width,
        height=height,
        palette=rng.choice(PALETTES[distribution]),
        background=(light, light - rng.randint(0, 12), light - rng.randint(0, 12)),
        ink=(dark, dark, dark),
        font_px=rng.choice((11, 16) if is_noisy else (12, 13, 14)),
        bar_percent=rng.randint(40, 60) if is_noisy else rng.randint(60, 80),
        has_grid=rng.random() < 0.5,
        is_noisy=is_noisy,
        seed=seed,
    )
    return Chart(
        kind=kind,
        title=title,
        labels=labels,
        series=series,
        values=values,
        colors=colors,
        is_colored_by_label=is_colored_by_label,
        style=style,
    )


def _values(
    rng: random.Random, kind: Kind, num_series: int, num_labels: int
) -> tuple[tuple[int, ...], ...]:
    """Values that are all different; those of a pie are percentages."""
    count = num_series * num_labels
    if kind == "pie":
        while True:
            cuts = sorted(rng.sample(range(1, 20), num_labels - 1))
            shares = [5 * (b - a) for a, b in zip([0, *cuts], [*cuts, 20], strict=True)]
            if len(set(shares)) == num_labels and min(shares) >= 10:
                return (tuple(shares),)
    flat = rng.sample(range(1, rng.choice(MAX_VALUES) + 1), count)
    return tuple(tuple(flat[i : i + num_labels]) for i in range(0, count, num_labels))


def all_questions(chart: Chart) -> list[ChartQuestion]:
    """Every question that the templates allow for a chart, in a fixed order."""
    found: list[ChartQuestion] = []

    def ask(kind: str, text: str, answer: object) -> None:
        found.append(ChartQuestion(kind, text, str(answer)))

    for name, row in zip(chart.series, chart.values, strict=True):
        for label, value in zip(chart.labels, row, strict=True):
            ask("value", f"What is the value of {f'{name} in {label}' if name else label}?", value)
        for word, pick in (("highest", max), ("lowest", min)):
            of = f" of {name}" if name else ""
            answer = chart.labels[row.index(pick(row))]
            ask("extreme", f"Which label has the {word} value{of}?", answer)
        has_terms = chart.kind != "pie" and max(map(max, chart.values)) <= MAX_TERM
        where = f" in {name}" if name else ""
        cells = list(zip(chart.labels, row, strict=True))
        for (first, a), (second, b) in permutations(cells, 2):
            ask("compare", f"Is {first} greater than {second}{where}?", "Yes" if a > b else "No")
            if has_terms:
                ask("sum", f"What is the sum of {first} and {second}{where}?", a + b)
                about = f"the difference of {first} and {second}{where}"
                ask("difference", f"What is {about}?", abs(a - b))
    marks = {"line": "points", "pie": "slices"}.get(chart.kind, "bars")
    kind = "label" if chart.is_colored_by_label else "series"
    for place, (name, color) in enumerate(chart.named_colors):
        ask("color", f"What color is {name}?", color)
        ask("color", f"Which {kind} is {color}?", name)
        if chart.is_colored_by_label:
            mark, value = marks.removesuffix("s"), chart.values[0][place]
            ask("color value", f"What is the value of the {color} {mark}?", value)
    if not chart.named_colors:
        ask("color", f"What color are the {marks}?", chart.colors[0])
    ask("count", f"How many {marks} are there?", len(chart.labels) * len(chart.series))
    ask("title", "What is the title?", chart.title)
    return found


def make_questions(chart: Chart, seed: int, count: int) -> list[ChartQuestion]:
    """`count` questions about a chart: kinds first, so that rare kinds are asked as often."""
    if count < 1:
        raise ConfigError(f"expected one question or more, got {count}")
    rng = random.Random(f"questions {seed}")
    by_kind: dict[str, list[ChartQuestion]] = {}
    for question in all_questions(chart):
        by_kind.setdefault(question.kind, []).append(question)
    chosen: list[ChartQuestion] = []
    while len(chosen) < count:
        kinds = [kind for kind in WEIGHTS if kind in by_kind]
        kind = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        question = rng.choice(by_kind[kind])
        if kind == "compare" and (rng.random() < 0.5) != (question.answer == "Yes"):
            continue
        chosen.append(question)
    return chosen


# How often a kind of question is asked, where the chart allows it.
WEIGHTS = {
    "value": 30,
    "extreme": 18,
    "compare": 14,
    "sum": 6,
    "difference": 6,
    "color": 10,
    "color value": 6,
    "count": 6,
    "title": 4,
}


def practice(chart: Chart, seed: int, count: int) -> list[ChartQuestion]:
    """Up to `count` questions of one or two words, in random order: for training only.

    They teach to find what belongs to a label or a color, with little else to learn from.
    """
    asked: list[ChartQuestion] = []
    for name, row in zip(chart.series, chart.values, strict=True):
        for label, value in zip(chart.labels, row, strict=True):
            what = f"{name} {label}?" if name else f"{label}?"
            asked.append(ChartQuestion("practice", what, str(value)))
    for name, color in chart.named_colors:
        asked.append(ChartQuestion("practice", f"{name} color?", color))
        asked.append(ChartQuestion("practice", f"{color}?", name))
    random.Random(f"practice {seed}").shuffle(asked)
    return asked[:count]


def description(chart: Chart) -> ChartQuestion:
    """A question that has the whole chart as its answer: for training only."""
    parts = [
        f"{name} {label} {row[i]}".strip()
        for i, label in enumerate(chart.labels)
        for name, row in zip(chart.series, chart.values, strict=True)
    ]
    return ChartQuestion("description", "Read the chart.", ", ".join(parts))


def vocabulary() -> list[str]:
    """Every word, digit and mark that questions and answers are made of, in a fixed order."""
    texts = [*THEMES, *(label for labels in THEMES.values() for label in labels)]
    texts += [*SERIES, *COLORS, "Yes No ? . ,", " ".join("0123456789"), "Read the chart"]
    texts += ["What is the value of in the slice bar", "Which label has the highest lowest value"]
    texts += ["Is greater than", "sum difference of and", "What color is are the series"]
    texts += ["How many bars points slices are there title"]
    return list(dict.fromkeys(word for text in texts for word in text.split()))
