"""Charts as images, drawn with pillow at twice their size and reduced, and questions about them.

Every value is printed where it is shown: a small model reads numbers more easily than heights.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from octavo.demo.charts import COLORS, Chart, Distribution, Rgb, make_chart, make_questions
from octavo.errors import UnsupportedError
from octavo.measure.evaluate.question_files import ChartQuestion

UP = 2  # drawn larger by this, then reduced: smooth edges
GRID: Rgb = (215, 215, 215)
QUESTIONS_PER_CHART = 4
PlaceKind = Literal["label", "series", "value"]


@dataclass(frozen=True)
class Place:
    """Where a text stands, the middle of it in pixels, and what it names or tells.

    series, label: indices of the chart's; a label's own text belongs to all series, and that of a
    series to all labels: 0 then.
    """

    kind: PlaceKind
    series: int
    label: int
    x: float
    y: float


def draw_chart(chart: Chart) -> Image.Image:
    """The image of a chart, RGB, of its style's size."""
    return draw_with_places(chart)[0]


def draw_with_places(chart: Chart) -> tuple[Image.Image, list[Place]]:
    """The image of a chart, and where its labels, series and values are written."""
    style = chart.style
    image = Image.new("RGB", (style.width * UP, style.height * UP), style.background)
    if style.is_noisy:  # uneven light and grain, as a photograph of paper has them
        rng = np.random.default_rng(style.seed)
        light = Image.fromarray(rng.integers(0, 70, (4, 5, 3), dtype=np.uint8))
        shade = np.asarray(light.resize(image.size, Image.Resampling.BICUBIC), dtype=np.int16)
        grain = rng.integers(-12, 13, shade.shape, dtype=np.int16)
        pixels = np.clip(np.asarray(image, dtype=np.int16) - shade + grain, 0, 255)
        image = Image.fromarray(pixels.astype(np.uint8))
    pen = _Pen(chart, image)
    {"horizontal": pen.horizontal_bars, "line": pen.line, "pie": pen.pie}.get(
        chart.kind, pen.bars
    )()
    return image.reduce(UP), pen.places


def generated_questions(
    num_questions: int, distribution: Distribution = "plain", first_seed: int = 0
) -> list[ChartQuestion]:
    """Questions about charts of consecutive seeds, four about each; training uses other seeds."""
    found: list[ChartQuestion] = []
    for seed in range(first_seed, first_seed + -(-num_questions // QUESTIONS_PER_CHART)):
        chart = make_chart(seed, distribution)
        image = draw_chart(chart)
        asked = make_questions(chart, seed, QUESTIONS_PER_CHART)
        found += [ChartQuestion(image, question.text, (question.answer,)) for question in asked]
    return found[:num_questions]


@cache
def _font(size_px: int) -> Any:
    font = ImageFont.load_default(size_px)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise UnsupportedError(
            "expected pillow with FreeType, whose built-in font has sizes, got one without; "
            "install pillow from PyPI"
        )
    return font


class _Pen:
    """One chart being drawn; all lengths are in drawn pixels."""

    def __init__(self, chart: Chart, image: Image.Image) -> None:
        self.chart, self.style = chart, chart.style
        self.draw = ImageDraw.Draw(image)
        self.width, self.height = image.size
        self.font = _font(self.style.font_px * UP)
        self.line_px = self.style.font_px * UP
        self.places: list[Place] = []
        title = _font((self.style.font_px + 1) * UP)
        self.text((self.width / 2, self.line_px * 0.25), chart.title, "ma", font=title)

    def text(
        self, xy: tuple[float, float], text: str, anchor: str, *, font: Any = None, fill: Any = None
    ) -> None:
        ink = self.style.ink if fill is None else fill
        self.draw.text(xy, text, fill=ink, font=font or self.font, anchor=anchor)

    def name(
        self,
        kind: PlaceKind,
        series: int,
        label: int,
        xy: tuple[float, float],
        anchor: str,
        *,
        fill: Any = None,
    ) -> None:
        """Write a label, the name of a series or a value, and note its place."""
        chart = self.chart
        text = {
            "label": chart.labels[label],
            "series": chart.series[series],
            "value": str(chart.values[series][label]),
        }[kind]
        self.text(xy, text, anchor, fill=fill)
        left, top, right, bottom = self.draw.textbbox(xy, text, font=self.font, anchor=anchor)
        x, y = (left + right) / 2 / UP, (top + bottom) / 2 / UP
        self.places.append(Place(kind, series, label, x, y))

    def color(self, series: int, label: int) -> str:
        name = self.chart.colors[label if self.chart.is_colored_by_label else series]
        return self.style.palette[COLORS.index(name)]

    def swatch(self, x: float, y: float, series: int, label: int) -> float:
        """A square of a color, of which x and y are the top left; returns where it ends."""
        end = x + self.line_px * 0.7
        self.draw.rectangle((x, y, end, y + end - x), fill=self.color(series, label))
        return end

    def legend(self, top: float) -> float:
        """The names of the series, each after a square of its color; returns where it ends."""
        widths = [self.font.getlength(name) + 2 * self.line_px for name in self.chart.series]
        x = (self.width - sum(widths)) / 2
        for series in range(len(self.chart.series)):
            end = self.swatch(x, top + self.line_px * 0.3, series, 0)
            at = (end + self.line_px * 0.3, top + self.line_px * 0.1)
            self.name("series", series, 0, at, "la")
            x += widths[series]
        return top + self.line_px * 1.2

    def frame(self) -> tuple[float, float, float, float]:
        """Axes with ticks for values that go up; returns left, top, right, bottom of the plot."""
        line, top_value = self.line_px, self.chart.axis_max
        top = line * 1.7
        if self.chart.kind == "grouped":
            top = self.legend(top)
        left, right = line * 2.0, self.width - line * 0.6
        top, bottom = top + line * 1.2, self.height - line * 1.6
        for tick in (0, top_value // 2, top_value):
            y = bottom - (bottom - top) * tick / top_value
            if self.style.has_grid and tick:
                self.draw.line((left, y, right, y), fill=GRID, width=UP)
            self.text((left - line * 0.3, y), str(tick), "rm", fill=(120, 120, 120))
        self.draw.line((left, top, left, bottom), fill=self.style.ink, width=UP)
        self.draw.line((left, bottom, right, bottom), fill=self.style.ink, width=UP)
        return left, top, right, bottom

    def bars(self) -> None:
        left, top, right, bottom = self.frame()
        num_series = len(self.chart.series)
        slot = (right - left) / len(self.chart.labels)
        width = slot * self.style.bar_percent / 100 / num_series
        for i in range(len(self.chart.labels)):
            center = left + (i + 0.5) * slot
            self.name("label", 0, i, (center, bottom + self.line_px * 0.3), "ma")
            for s, row in enumerate(self.chart.values):
                x = center + (s - num_series / 2) * width
                y = bottom - (bottom - top) * row[i] / self.chart.axis_max
                self.draw.rectangle((x, y, x + width - UP, bottom), fill=self.color(s, i))
                self.name("value", s, i, (x + width / 2, y - self.line_px * 0.1), "md")

    def horizontal_bars(self) -> None:
        line, labels = self.line_px, self.chart.labels
        left = line * 0.8 + max(self.font.getlength(label) for label in labels)
        top, bottom, right = line * 1.8, self.height - line * 0.8, self.width - line * 2.0
        slot = (bottom - top) / len(labels)
        half = slot * self.style.bar_percent / 200
        self.draw.line((left, top, left, bottom), fill=self.style.ink, width=UP)
        for i, value in enumerate(self.chart.values[0]):
            y = top + (i + 0.5) * slot
            x = left + (right - left) * value / self.chart.axis_max
            self.draw.rectangle((left + UP, y - half, x, y + half), fill=self.color(0, i))
            self.name("label", 0, i, (left - line * 0.3, y), "rm")
            self.name("value", 0, i, (x + line * 0.3, y), "lm")

    def line(self) -> None:
        left, top, right, bottom = self.frame()
        slot = (right - left) / len(self.chart.labels)
        color, radius = self.color(0, 0), self.line_px * 0.25
        points = [
            (left + (i + 0.5) * slot, bottom - (bottom - top) * value / self.chart.axis_max)
            for i, value in enumerate(self.chart.values[0])
        ]
        self.draw.line(points, fill=color, width=2 * UP, joint="curve")
        for i, (x, y) in enumerate(points):
            self.draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
            self.name("label", 0, i, (x, bottom + self.line_px * 0.3), "ma")
            self.name("value", 0, i, (x, y - self.line_px * 0.4), "md")

    def pie(self) -> None:
        line = self.line_px
        top = line * 1.9
        radius = min((self.height - top - line * 0.6) / 2, self.width * 0.26)
        x, y = line * 0.8 + radius, top + radius
        start = -90.0
        right = x + radius + line * 1.2
        for i, value in enumerate(self.chart.values[0]):
            stop = start + 3.6 * value
            box = (x - radius, y - radius, x + radius, y + radius)
            self.draw.pieslice(box, start, stop, fill=self.color(0, i))
            middle = math.radians((start + stop) / 2)
            at = (x + 0.62 * radius * math.cos(middle), y + 0.62 * radius * math.sin(middle))
            self.name("value", 0, i, at, "mm", fill=(255, 255, 255))
            row = top + (i + 0.5) * line * 1.6
            end = self.swatch(right, row - line * 0.35, 0, i)
            self.name("label", 0, i, (end + line * 0.3, row), "lm")
            start = stop
