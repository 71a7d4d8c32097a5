"""Needles that were found, as a table and heat maps."""

import pytest

from octavo.measure.records import Machine, Measurement
from octavo.measure.report.html import render
from octavo.measure.report.quality import NEEDLE, needle_figures, needle_table
from octavo.measure.report.tables import tokens_text

MACHINE = Machine.current()
LENGTHS, DEPTHS = (8192, 131072), (0.0, 0.5)


def record(recipe, length, depth, found):
    case = {"model": "m", "haystack": "pairs", "recipe": recipe, "length": length, "depth": depth}
    return Measurement(
        op="needle",
        impl="transformers",
        case={**case, "repetitions": 2},
        values={"found_percent": found, "num_found": found / 50},
        machine=MACHINE,
        command="octavo eval needle",
    )


RECORDS = [
    record(recipe, length, depth, 0.0 if recipe == "one" and length > 10**5 and depth else 100.0)
    for recipe in ("bf16", "one")
    for length in LENGTHS
    for depth in DEPTHS
]


def test_a_row_for_each_recipe_with_its_recovery():
    table = needle_table(RECORDS)
    assert table.header == ("recipe", "8k", "128k", "all", "± s.e.", "recovery (%)")
    assert table.rows[0] == ("bf16", 100, 100, 100, 0, None)
    assert table.rows[1][:4] == ("one", 100, 50, 75) and table.rows[1][5] == 75
    assert table.rows[1][4] == pytest.approx(100 * (0.75 * 0.25 / 7) ** 0.5)


def test_a_heat_map_for_each_recipe():
    (lost,) = needle_figures(RECORDS)
    (trace,) = lost.data
    assert trace["x"] == ["8k", "128k"] and trace["y"] == ["0", "50"]
    assert trace["z"] == [[100, 100], [100, 0]]
    assert "most are lost at 128k" in lost.caption
    (section,) = NEEDLE.make(RECORDS)  # one color would say less than a sentence
    assert "bf16 finds 100 % at every length and depth." in section.text
    assert lost.layout["xaxis"]["title"]["text"] == "tokens of the prompt"


def test_cells_that_are_missing_stay_empty():
    (figure,) = needle_figures([RECORDS[4], RECORDS[7]])
    assert figure.data[0]["z"] == [[100, None], [None, 0]]


def test_the_page_has_heat_maps_and_table():
    page = render(NEEDLE.make(RECORDS), title="needles")
    assert page.count('"type": "heatmap"') == 1 and "recovery (%)" in page
    assert "https://" not in page.split("<script>")[0]


@pytest.mark.parametrize(
    ("number", "text"), [(512, "512"), (1000, "1000"), (8192, "8k"), (1536, "1.5k"), (2**20, "1M")]
)
def test_tokens_as_people_say_them(number, text):
    assert tokens_text(number) == text
