"""Images of records on a page: which are shown, which are not, and why."""

import base64
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from octavo.measure import store
from octavo.measure.records import Machine, Measurement
from octavo.measure.report import html, images
from octavo.measure.report.html import render, sections_markdown, with_images

MACHINE = Machine(cpu="A CPU", python="3.12", platform="Linux", gpu="A GPU", capability=(9, 0))
row = partial(Measurement, impl="octavo", machine=MACHINE)


def test_pictures_with_the_worst_one():
    def scored(name, **values):
        case = {"model": "dit", "row": name, "num_pictures": 4, "num_inference_steps": 20}
        baseline = "bf16" if values else None
        return row(op="images", case=case, values=values, baseline=baseline, command="x")

    records = [scored("bf16"), scored("fp8", psnr_db=36.0, worst_psnr_db=30.0)]
    (section,) = images.IMAGES.make(records)
    (trace,) = section.figures[0].data
    assert trace["x"] == [36.0] and trace["error_x"]["arrayminus"] == [6.0]
    assert section.tables[0].header == ("row", "PSNR (dB)", "worst PSNR (dB)")
    (alone,) = images.IMAGES.make(records[:1])
    assert alone.figures == () and alone.tables[0].rows == (("bf16",),)


JPEG, PNG = b"\xff\xd8\xff\xe0 a jpeg", b"\x89PNG\r\n\x1a\n a png"


def drawn(name, picture, command="octavo eval images", **values):
    case = {"model": "dit", "row": name, "num_pictures": 4, "picture": picture}
    baseline = "bf16" if values else None
    return row(op="images", case=case, values=values, baseline=baseline, command=command)


SCORES = {"psnr_db": 36.04, "worst_psnr_db": 30.0}


def test_pictures_side_by_side_from_beside_their_records(tmp_path):
    (tmp_path / "sheet.jpg").write_bytes(JPEG)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "two.PNG").write_bytes(PNG)
    command = "octavo eval images --prompt 'a <b>' --prompt cat"
    records = [
        drawn("bf16", "sheet.jpg", command),
        drawn("fp8", "sheet.jpg", command, **SCORES),
        drawn("fp8+attention", "sub/two.PNG", **SCORES),
    ]
    found = with_images(records, tmp_path / "records.jsonl")
    assert records[0].case["picture"] == "sheet.jpg"  # as it was
    assert with_images(found, tmp_path / "elsewhere" / "records.jsonl") == found
    (section,) = images.IMAGES.make(found)
    both, one = section.sheets
    assert base64.b64decode(both.url.removeprefix("data:image/jpeg;base64,")) == JPEG
    assert one.url.startswith("data:image/png;base64,")
    assert both.caption == (
        "dit: “a <b>”, “cat” in bf16, fp8, by the same noise. fp8 has 36.0 dB PSNR against bf16, "
        "the worst of 4 images 30.0 dB."
    )
    assert both.alt == "Images side by side, dit: “a <b>”, “cat” in bf16, fp8"
    assert "4 prompts in bf16, fp8+attention" in one.caption and "not shown" not in section.text
    page = render([section])
    assert f'<img src="{both.url}" alt="Images side by side, dit: “a &lt;b&gt;”' in page
    assert f"Image: {both.caption}" in sections_markdown([section], title="x")


def test_prompts_of_a_picture_may_be_said():
    url = "data:image/png;base64,QUJD"
    many = "; ".join(f"p{n}" for n in range(14))
    said = [
        replace(r, case={**r.case, "picture_prompts": many}) for r in [drawn("a", url, **SCORES)]
    ]
    (sheet,) = images.IMAGES.make(said)[0].sheets
    assert "“p0”, “p1”" in sheet.caption and "“p11” and 2 more in bf16, a" in sheet.caption
    (sheet,) = images.IMAGES.make([drawn("a", url, "by 'hand", **SCORES)])[0].sheets
    assert "dit: 4 prompts in bf16, a" in sheet.caption


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lost.jpg", "there is no such file"),
        ("folder.png", "there is no such file"),
        ("/etc/passwd", "expected a path from the records file on"),
        ("{folder}/project/results/good.png", "expected a path from the records file on"),
        ("..\\good.png", "expected a path from the records file on"),
        ("notes.txt", "expected an image, one of .jpg, .jpeg, .png"),
        ("page.svg", "expected an image, one of .jpg, .jpeg, .png"),
        ("wrong.jpg", "expected the bytes of image/jpeg"),
        ("large.png", "expected at most 0 MiB"),
        ("../../outside.png", "expected an image in the folder of the records file or its"),
        ("link.png", "expected an image in the folder of the records file or its"),
        ("data:image/svg+xml;base64,QUJD", "expected an image, one of"),
        ('data:image/png;base64,QUJD" onerror=', "expected an image, one of"),
    ],
)
def test_what_is_no_picture_of_the_project_is_not_shown(tmp_path, monkeypatch, name, why):
    monkeypatch.setattr(html, "MAX_BYTES", 64)
    results = tmp_path / "project" / "results"
    results.mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").touch()
    (tmp_path / "outside.png").write_bytes(PNG)
    (results / "good.png").write_bytes(PNG)
    (results / "wrong.jpg").write_bytes(PNG)
    (results / "large.png").write_bytes(PNG * 64)
    (results / "notes.txt").write_bytes(PNG)
    (results / "folder.png").mkdir()
    (results / "link.png").symlink_to(tmp_path / "outside.png")
    name = name.format(folder=tmp_path)
    found = with_images([drawn("fp8", name, **SCORES)], results / "r.jsonl")
    (section,) = images.IMAGES.make(found)
    assert section.sheets == () and f"The image {name} of fp8 is not shown: {why}" in section.text


def test_a_picture_may_be_anywhere_in_the_project_of_its_records(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "docs" / "sheet.png").write_bytes(PNG)
    record = drawn("fp8", "../docs/sheet.png", **SCORES)
    file = tmp_path / "results" / "r.jsonl"
    (found,) = with_images([record], file)
    assert "in the folder of the records file" in found.case["picture_problem"]
    (tmp_path / ".git").mkdir()
    (found,) = with_images([record], file)
    assert "picture_problem" not in found.case
    # Records that were not read by octavo report still say what they do not show.
    (section,) = images.IMAGES.make([record])
    assert "is not shown: it is read by octavo report" in section.text


def test_the_repository_s_records_show_theirs():
    file = Path(__file__).parents[2] / "results" / "images_h200.jsonl"
    (section, *_) = images.IMAGES.make(with_images(store.read(file), file))
    (sheet,) = section.sheets
    assert sheet.url.startswith("data:image/jpeg;base64,") and "not shown" not in section.text
    assert "“dog”" in sheet.caption and "in bf16, fp8, fp8+attention" in sheet.caption
    assert "fp8 has 36.4 dB PSNR against bf16, the worst of 16 images 30.4 dB" in sheet.caption
