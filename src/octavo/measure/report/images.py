"""What FP8 does to answers about charts, and to the images of a pipeline.

Images are those that records have as data URLs (`with_images`).
"""

import shlex
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise

from octavo.measure.records import Measurement
from octavo.measure.report.html import IMAGE, IMAGE_PROBLEM, is_image_url
from octavo.measure.report.sections import Kind, Rows, Sheet, dots

_MAX_PROMPTS = 12  # that a caption names


def _by_image(rows: Rows) -> dict[str, list[Measurement]]:
    """The rows of each image that records have as a data URL."""
    found: dict[str, list[Measurement]] = {}
    for row in rows:
        if is_image_url(url := row.case.get(IMAGE)):
            found.setdefault(str(url), []).append(row)
    return found


def _unseen(rows: Rows, name: str) -> list[str]:
    """Which images of records are not shown, and why; name: what records call a row."""
    problems: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        image = row.case.get(IMAGE)
        if image is not None and not is_image_url(image):
            unread = "it is read by octavo report, from the records file on"
            key = str(image), str(row.case.get(IMAGE_PROBLEM, unread))
            problems.setdefault(key, []).append(str(row.case[name]))
    return [
        f"The image {image} of {', '.join(own)} is not shown: {why}."
        for (image, why), own in problems.items()
    ]


def _chart_sheets(rows: Rows) -> Iterable[Sheet]:
    """Charts of records with images as data URLs (`with_images`), each image once."""
    names = ", ".join(dict.fromkeys(str(row.case["recipe"]) for row in rows))
    about = f"Charts with a question, the truth and the answers of {names}"
    more = "first those that recipes answer differently, if there are any."
    for url in _by_image(rows):
        yield Sheet(caption=f"{about}; {more}", alt=about, url=url)


CHARTQA = Kind(
    ops=("chartqa",),
    needs="model recipe relaxed_accuracy_percent num_questions",
    by="model data num_questions",
    rows="recipe",
    title="Questions about charts: {model}, {data}",
    text=lambda rows: (
        f"{rows[0].get('num_questions')} questions. Relaxed accuracy: a number within 5 %, or the "
        "same word. A difference whose interval has 0 in it is none that these questions could "
        f"show. {' '.join(_unseen(rows, 'recipe'))}"
    ),
    figures=dots(
        "difference_points",
        caption="Relaxed accuracy of each recipe less that of the baseline; at 0 both are right as "
        "often. Bars are intervals of 95 %.",
        title="difference (points)",
        reach=lambda values: (
            values["difference_high_points"] - values["difference_points"],
            values["difference_points"] - values["difference_low_points"],
        ),
        series=lambda row: "difference",
        reference=0.0,
    ),
    sheets=_chart_sheets,
    caption="Charts, by recipe",
    columns="recipe relaxed_accuracy_percent exact_match_percent recovery_percent "
    "difference_points difference_low_points difference_high_points",
)


def _scored(rows: Rows) -> Rows:
    return [row for row in rows if {"psnr_db", "worst_psnr_db"} <= row.values.keys()]


def _image_text(rows: Rows) -> str:
    """What is compared, and why an image that records name is not shown."""
    steps = rows[0].case.get("num_inference_steps")
    same = "Images of the same prompts and noise as those of"
    said = [f"{same} {row.baseline}, after {steps} steps." for row in _scored(rows)[:1]]
    return "\n\n".join([*said, *_unseen(rows, "row")])


_PSNR_DOTS = dots(
    "psnr_db",
    caption="Mean PSNR over the images of each row; higher is better. Bars reach down to the worst "
    "image.",
    title="PSNR (dB)",
    reach=lambda values: (0.0, values["psnr_db"] - values["worst_psnr_db"]),
    name="row",
    series=lambda row: "PSNR",
)


def _image_sheets(rows: Rows) -> Iterable[Sheet]:
    """Each image once, with all rows that it is of."""
    for url, own in _by_image(rows).items():
        firsts = dict.fromkeys(row.baseline for row in own if row.baseline is not None)
        names = dict.fromkeys([*firsts, *(str(row.case["row"]) for row in own)])
        about = f"{own[0].case['model']}: {_prompts(own[0])} in {', '.join(names)}"
        scores = [
            f"{row.case['row']} has {row.values['psnr_db']:.1f} dB PSNR against {row.baseline}, "
            f"the worst of {row.case.get('num_pictures')} images "
            f"{row.values['worst_psnr_db']:.1f} dB"
            for row in _scored(own)
        ]
        yield Sheet(
            caption=". ".join([f"{about}, by the same noise", *scores]) + ".",
            alt=f"Images side by side, {about}",
            url=url,
        )


def _prompts(record: Measurement) -> str:
    """What was drawn: the prompts that the record or its command names, or their number."""
    prompts: list[str] = []
    if (said := record.case.get("picture_prompts")) is not None:
        prompts = str(said).split("; ")
    else:
        with suppress(ValueError):  # of a command that somebody wrote by hand
            words = shlex.split(record.command)
            prompts = [text for flag, text in pairwise(words) if flag == "--prompt"]
    if not prompts:
        return f"{record.case.get('num_pictures', 'some')} prompts"
    more = f" and {len(prompts) - _MAX_PROMPTS} more" if len(prompts) > _MAX_PROMPTS else ""
    return ", ".join(f"“{prompt}”" for prompt in prompts[:_MAX_PROMPTS]) + more


IMAGES = Kind(
    ops=("images",),
    needs="model row",
    by="model dtype prompts_sha256 num_pictures num_inference_steps seed",
    rows="row",
    title="Images: {model}, {num_pictures} prompts",
    text=_image_text,
    figures=lambda rows: _PSNR_DOTS(_scored(rows)),
    sheets=_image_sheets,
    caption="Images, by row",
    columns="row psnr_db worst_psnr_db ssim worst_ssim lpips worst_lpips clip_score "
    "worst_clip_score",
)
