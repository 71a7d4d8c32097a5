"""Charts as pictures, drawn with pillow at twice their size and reduced.

Every value is printed where it is shown: a small model reads numbers more easily than heights.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from octavo.errors import UnsupportedError
from octavo.measure.evaluate.charts import COLORS, Chart, Rgb

UP = 2  # drawn larger by this, then reduced: smooth edges
GRID: Rgb = (215, 215, 215)


def draw_chart(chart: Chart) -> Image.Image:
    """The picture of a chart, RGB, of its style's size."""
    style = chart.style
    image = Image.new("RGB", (style.width * UP, style.height * UP), style.background)
    if style.is_noisy:
        image = _photo_like(image, style.seed)
    pen = _Pen(chart, image)
    match chart.kind:
        case "bar" | "grouped":
            pen.bars()
        case "horizontal":
            pen.horizontal_bars()
        case "line":
            pen.line()
        case "pie":
            pen.pie()
    return image.reduce(UP)


@cache
def _font(size_px: int) -> Any:
    font = ImageFont.load_default(size_px)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise UnsupportedError(
            "expected pillow with FreeType, whose built-in font has sizes, got one without; "
            "install pillow from PyPI"
        )
    return font


def _photo_like(image: Image.Image, seed: int) -> Image.Image:
    """The image under uneven light and grain, as a photograph of paper has them."""
    rng = np.random.default_rng(seed)
    light = Image.fromarray(rng.integers(0, 70, (4, 5, 3), dtype=np.uint8))
    shade = np.asarray(light.resize(image.size, Image.Resampling.BICUBIC), dtype=np.int16)
    grain = rng.integers(-12, 13, shade.shape, dtype=np.int16)
    pixels = np.clip(np.asarray(image, dtype=np.int16) - shade + grain, 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


class _Pen:
    """One chart being drawn; all lengths are in drawn pixels."""

    def __init__(self, chart: Chart, image: Image.Image) -> None:
        self.chart, self.style = chart, chart.style
        self.draw = ImageDraw.Draw(image)
        self.width, self.height = image.size
        self.font = _font(self.style.font_px * UP)
        self.line_px = self.style.font_px * UP
        title = _font((self.style.font_px + 1) * UP)
        self.text((self.width / 2, self.line_px * 0.25), chart.title, "ma", font=title)

    def text(
        self, xy: tuple[float, float], text: str, anchor: str, *, font: Any = None, fill: Any = None
    ) -> None:
        ink = self.style.ink if fill is None else fill
        self.draw.text(xy, text, fill=ink, font=font or self.font, anchor=anchor)

    def color(self, series: int, label: int) -> Rgb:
        name = self.chart.colors[label if self.chart.is_colored_by_label else series]
        return self.style.palette[COLORS.index(name)]

    def legend(self, top: float) -> float:
        """The names of the series, each after a square of its color; returns where it ends."""
        size = self.line_px * 0.7
        widths = [self.font.getlength(name) + 2 * self.line_px for name in self.chart.series]
        x = (self.width - sum(widths)) / 2
        for series, name in enumerate(self.chart.series):
            y = top + self.line_px * 0.3
            self.draw.rectangle((x, y, x + size, y + size), fill=self.color(series, 0))
            self.text((x + size + self.line_px * 0.3, top + self.line_px * 0.1), name, "la")
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
        for i, label in enumerate(self.chart.labels):
            center = left + (i + 0.5) * slot
            self.text((center, bottom + self.line_px * 0.3), label, "ma")
            for s, row in enumerate(self.chart.values):
                x = center + (s - num_series / 2) * width
                y = bottom - (bottom - top) * row[i] / self.chart.axis_max
                self.draw.rectangle((x, y, x + width - UP, bottom), fill=self.color(s, i))
                self.text((x + width / 2, y - self.line_px * 0.1), str(row[i]), "md")

    def horizontal_bars(self) -> None:
        line, labels = self.line_px, self.chart.labels
        left = line * 0.8 + max(self.font.getlength(label) for label in labels)
        top, bottom, right = line * 1.8, self.height - line * 0.8, self.width - line * 2.0
        slot = (bottom - top) / len(labels)
        half = slot * self.style.bar_percent / 200
        self.draw.line((left, top, left, bottom), fill=self.style.ink, width=UP)
        for i, (label, value) in enumerate(zip(labels, self.chart.values[0], strict=True)):
            y = top + (i + 0.5) * slot
            x = left + (right - left) * value / self.chart.axis_max
            self.draw.rectangle((left + UP, y - half, x, y + half), fill=self.color(0, i))
            self.text((left - line * 0.3, y), label, "rm")
            self.text((x + line * 0.3, y), str(value), "lm")

    def line(self) -> None:
        left, top, right, bottom = self.frame()
        slot = (right - left) / len(self.chart.labels)
        color, radius = self.color(0, 0), self.line_px * 0.25
        points = [
            (left + (i + 0.5) * slot, bottom - (bottom - top) * value / self.chart.axis_max)
            for i, value in enumerate(self.chart.values[0])
        ]
        self.draw.line(points, fill=color, width=2 * UP, joint="curve")
        named = zip(points, self.chart.labels, self.chart.values[0], strict=True)
        for (x, y), label, value in named:
            self.draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
            self.text((x, bottom + self.line_px * 0.3), label, "ma")
            self.text((x, y - self.line_px * 0.4), str(value), "md")

    def pie(self) -> None:
        line = self.line_px
        top = line * 1.9
        radius = min((self.height - top - line * 0.6) / 2, self.width * 0.26)
        x, y = line * 0.8 + radius, top + radius
        start = -90.0
        right = x + radius + line * 1.2
        for i, (label, value) in enumerate(
            zip(self.chart.labels, self.chart.values[0], strict=True)
        ):
            end = start + 3.6 * value
            box = (x - radius, y - radius, x + radius, y + radius)
            self.draw.pieslice(box, start, end, fill=self.color(0, i))
            middle = math.radians((start + end) / 2)
            at = (x + 0.62 * radius * math.cos(middle), y + 0.62 * radius * math.sin(middle))
            self.text(at, str(value), "mm", fill=(255, 255, 255))
            row = top + (i + 0.5) * line * 1.6
            size = line * 0.7
            self.draw.rectangle(
                (right, row - size / 2, right + size, row + size / 2), fill=self.color(0, i)
            )
            self.text((right + size + line * 0.3, row), label, "lm")
            start = end
