"""A picture of charts, with a question about each, the truth and what each row answered."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.measure.evaluate.chartqa_data import Question
from octavo.measure.evaluate.side_by_side import fitting

COLUMNS = 3
WIDTH, GAP, LINE = 300, 12, 18  # pixels: of a chart, between charts, of a line of text
QUALITY = 88  # of the JPEG


def draw_chart_sheet(
    questions: Sequence[Question], answers: Mapping[str, Sequence[str]], shown: Sequence[int]
) -> bytes:
    """A JPEG of the questions `shown`; answers: of all questions, by the names of rows."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=13)
    charts = [_fitted(questions[index].image) for index in shown]
    num_lines = 2 + len(answers)
    height = max(chart.height for chart in charts) + num_lines * LINE + GAP
    across = min(COLUMNS, len(charts))
    down = -(-len(charts) // across)
    size = (across * (WIDTH + GAP) + GAP, down * (height + GAP) + GAP)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for place, (index, chart) in enumerate(zip(shown, charts, strict=True)):
        left = GAP + place % across * (WIDTH + GAP)
        top = GAP + place // across * (height + GAP)
        sheet.paste(chart, (left, top))
        truth = questions[index].answers[0]
        lines = [(questions[index].text, "black"), (f"truth: {truth}", "#444444")]
        for name, own in answers.items():
            is_same = own[index] == truth
            lines.append(
                (f"{name}: {own[index] or '(nothing)'}", "#1b6e3c" if is_same else "#a02020")
            )
        for number, (text, color) in enumerate(lines):
            at = (left, top + chart.height + 2 + number * LINE)
            pen.text(at, fitting(pen, text, font, WIDTH), fill=color, font=font)
    content = io.BytesIO()
    sheet.save(content, "JPEG", quality=QUALITY)
    return content.getvalue()


def _fitted(image: Any) -> Any:
    from PIL import Image

    size = (WIDTH, max(1, round(image.height * WIDTH / image.width)))
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
