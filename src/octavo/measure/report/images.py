"""What FP8 does to pictures as sections of a page: scores, and the pictures beside each other."""

import shlex
from collections.abc import Sequence

from octavo.measure.records import Measurement
from octavo.measure.report.filled import filled_table
from octavo.measure.report.html import Section, Sheet
from octavo.measure.report.pictures import NAME, PROBLEM, is_picture_url
from octavo.measure.report.plots import Figure
from octavo.measure.report.points import Point, points
from octavo.measure.report.select import Key, grouped, newest

_COLUMNS = (
    *("row", "psnr_db", "worst_psnr_db", "ssim", "worst_ssim", "lpips", "worst_lpips"),
    *("clip_score", "worst_clip_score"),
)
_MAX_PROMPTS = 12  # that a caption names


def images_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine, model and set of prompts of `octavo eval images`.

    Pictures are those that records have as data URLs (`with_pictures`).
    """
    names = ("model", "dtype", "prompts_sha256", "num_pictures", "num_inference_steps", "seed")
    return [_section(key, newest(own, "row")) for key, own in grouped(records, *names).items()]


def _section(key: Key, rows: Sequence[Measurement]) -> Section:
    machine, model, *_ = key
    scored = [row for row in rows if {"psnr_db", "worst_psnr_db"} <= row.values.keys()]
    case, text, headline = rows[0].case, "", ""
    if scored:
        text = (
            f"Pictures of the same prompts and noise as those of {scored[0].baseline}, "
            f"after {case.get('num_inference_steps')} steps."
        )
        lowest = min(scored, key=lambda row: row.values["worst_psnr_db"])
        headline = (
            f"{model}: the worst picture has {lowest.values['worst_psnr_db']:.1f} dB PSNR against "
            f"{lowest.baseline}, with {lowest.case['row']}."
        )
    return Section(
        title=f"Pictures: {model}, {case.get('num_pictures')} prompts, {machine}",
        text="\n\n".join([text, *_problems(rows)]),
        headline=headline,
        figures=_figures(scored),
        tables=(filled_table(rows, caption="Pictures, by row", columns=_COLUMNS),),
        sheets=_sheets(rows),
    )


def _figures(scored: Sequence[Measurement]) -> tuple[Figure, ...]:
    if not scored:
        return ()
    some = [
        Point(
            str(row.case["row"]),
            row.values["psnr_db"],
            0.0,
            row.values["psnr_db"] - row.values["worst_psnr_db"],
        )
        for row in scored
    ]
    caption = (
        "Mean PSNR over the pictures of each row; higher is better. Bars reach down to the worst "
        "picture."
    )
    return (points({"PSNR": some}, caption=caption, value_title="PSNR (dB)"),)


def _problems(rows: Sequence[Measurement]) -> list[str]:
    """A sentence for each picture that is named and not shown."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        name = row.case.get(NAME)
        if name is not None and not is_picture_url(name):
            why = str(
                row.case.get(PROBLEM, "it is read by octavo report, from the records file on")
            )
            found.setdefault((str(name), why), []).append(str(row.case["row"]))
    return [
        f"The picture {name} of {', '.join(own)} is not shown: {why}."
        for (name, why), own in found.items()
    ]


def _sheets(rows: Sequence[Measurement]) -> tuple[Sheet, ...]:
    """Each picture once, with all rows that it is of."""
    found: dict[str, list[Measurement]] = {}
    for row in rows:
        url = row.case.get(NAME)
        if is_picture_url(url):
            found.setdefault(str(url), []).append(row)
    return tuple(_sheet(url, own) for url, own in found.items())


def _sheet(url: str, rows: Sequence[Measurement]) -> Sheet:
    firsts = dict.fromkeys(row.baseline for row in rows if row.baseline is not None)
    names = list(dict.fromkeys([*firsts, *(str(row.case["row"]) for row in rows)]))
    scores = [
        f"{row.case['row']} has {row.values['psnr_db']:.1f} dB PSNR against {row.baseline}, the "
        f"worst of {row.case.get('num_pictures')} pictures {row.values['worst_psnr_db']:.1f} dB"
        for row in rows
        if {"psnr_db", "worst_psnr_db"} <= row.values.keys()
    ]
    about = f"{rows[0].case['model']}: {_prompts(rows[0])} in {', '.join(names)}"
    return Sheet(
        caption=". ".join([f"{about}, by the same noise", *scores]) + ".",
        alt=f"Pictures side by side, {about}",
        url=url,
    )


def _prompts(record: Measurement) -> str:
    """What was drawn: the prompts that the record or its command names, or their number."""
    said = record.case.get("picture_prompts")
    prompts = str(said).split("; ") if said is not None else _asked(record.command)
    if not prompts:
        return f"{record.case.get('num_pictures', 'some')} prompts"
    more = f" and {len(prompts) - _MAX_PROMPTS} more" if len(prompts) > _MAX_PROMPTS else ""
    return ", ".join(f"“{prompt}”" for prompt in prompts[:_MAX_PROMPTS]) + more


def _asked(command: str) -> list[str]:
    """The texts of --prompt in a command."""
    try:
        words = shlex.split(command)
    except ValueError:  # of a command that somebody wrote by hand
        return []
    pairs = zip(words, words[1:], strict=False)
    return [text for flag, text in pairs if flag == "--prompt"]
