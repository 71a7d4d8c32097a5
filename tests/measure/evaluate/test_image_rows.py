"""Names of rows, and the recipes that they mean."""

import pytest

from octavo import Recipe
from octavo.errors import ConfigError
from octavo.measure.evaluate.image_rows import WORDS, parse_row, parse_rows, plain_row

BLOCK = {"weight": "block 128x128", "activation": "block 1x128"}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("fp8", {"linear": "fp8"}),
        ("attention", {"attention": "fp8"}),
        ("fp8+attention", {"linear": "fp8", "attention": "fp8"}),
        ("attention=head+fp8", {"linear": "fp8", "attention": {"granularity": "head"}}),
        ("fp8+block", {"linear": BLOCK}),
        ("block", {"linear": BLOCK}),
        ("tensor", {"linear": {"weight": "tensor", "activation": "tensor"}}),
        ("weights", {"linear": {"activation": None}}),
        ("static=a+b.json", {"linear": {"scaling": "static"}, "scales": "a+b.json"}),
        ("static=a+fp8s.json", {"linear": {"scaling": "static"}, "scales": "a+fp8s.json"}),
        (
            "fp8+static=s.json+attention+ignore=ff",
            {
                "linear": {"scaling": "static"},
                "scales": "s.json",
                "attention": "fp8",
                "ignored_layers": ["ff"],
            },
        ),
        (
            "fp8+ignore=re:a+b+ignore=0-3+include=img_mlp+weight_only=modulation",
            {
                "weight_only_layers": ["modulation"],
                "linear": "fp8",
                "ignored_layers": ["re:a+b", "0-3"],
                "included_layers": ["img_mlp"],
            },
        ),
        (
            "static=s.json+attention=static",
            {
                "linear": {"scaling": "static"},
                "attention": {"scaling": "static"},
                "scales": "s.json",
            },
        ),
        ("fp8+text_encoder", {"linear": "fp8", "text_encoder": "fp8"}),
        ("attention+skip=attn2", {"attention": "fp8", "skip_layers": ["attn2"]}),
    ],
)
def test_a_name_means_a_recipe(text, fields):
    assert parse_row(text) == Recipe(**fields)


@pytest.mark.parametrize("text", ["bf16", "fp16", "fp32"])
def test_a_plain_row_has_no_recipe(text):
    assert parse_row(text) is None


def test_a_recipes_file(tmp_path):
    recipe = Recipe(linear="fp8", ignored_layers=["ff_context"])
    recipe.save(tmp_path / "own.toml")
    assert parse_row(str(tmp_path / "own.toml")) == recipe
    with pytest.raises(ConfigError, match="none.json"):
        parse_row(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected words out of bf16, fp8"),
        ("int8", "got 'int8'"),
        ("fp8+bf16", "got 'bf16'"),
        ("fp8+", "got 'fp8.'"),
        ("static", "got 'static'"),
        ("fp8+ignore", "got 'ignore'"),
        ("fp8+ignore=", "got 'ignore='"),
        ("fp8=", "got 'fp8='"),
        ("fp8=channel", "fp8 without a value, got fp8=channel"),
        ("fp8+fp8", "each word once, got fp8 2 times"),
        ("block+tensor", "one kind of linear layers, got tensor and block"),
        ("block+static=s.json", "one kind of linear layers"),
        ("attention=row", "attention=head, =tensor or =static, got 'row'"),
        ("fp8+attention=static", "needs scales, got none"),
        ("attention+ignore=ff", "row attention.ignore=ff: .*needs quantized linear layers"),
        ("fp8+skip=attn", "skip_layers needs quantized attention"),
    ],
)
def test_wrong_names_are_one_sentence(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_row(text)


def test_rows_start_with_what_the_others_are_compared_with():
    rows = parse_rows(["bf16", "fp8"], "bfloat16")
    assert [row.name for row in rows] == ["bf16", "fp8"] and rows[0].recipe is None
    for names, message in (
        (["bf16"], "two different rows"),
        (["bf16", "bf16"], "two different rows"),
        (["fp8", "bf16"], "first row to compare with"),
        (["fp32", "fp8"], "rows in bfloat16, .* got 'fp32'"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_rows(names, "bfloat16")


def test_every_word_is_understood():
    values = {"static=FILE": "static=s.json", "include=PATTERN": "fp8+include=ff"}
    values |= {"ignore=PATTERN": "fp8+ignore=ff", "skip=PATTERN": "attention+skip=attn"}
    values |= {"weight_only=PATTERN": "fp8+weight_only=modulation"}
    for word in WORDS:
        parse_row(values.get(word, word))
    assert plain_row("float16") == "fp16"
    with pytest.raises(ConfigError, match="got 'auto'"):
        plain_row("auto")
