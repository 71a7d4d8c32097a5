"""Rows: every word, old and new, and the recipe that it means."""

import re

import pytest

from octavo import Recipe
from octavo.errors import ConfigError
from octavo.measure.rows import (
    CANONICAL,
    DIFFUSION,
    ENGINE,
    GENERATE,
    IMAGES,
    LANGUAGE,
    PLAIN,
    VISION,
    WORDS,
    Row,
    describe_words,
    parse_row,
    parse_rows,
    plain_row,
)

SCALES = {"layers.0": {"q": 0.5, "k": 0.5, "v": 0.5}}
BLOCK = {"weight": "block 128x128", "activation": "block 1x128"}
TENSOR = {"weight": "tensor", "activation": "tensor"}
STATIC_HEAD = {"granularity": "head", "scaling": "static"}
ROTATED = {"rotate_keys": True}
CENTERED = {"rotate_keys": True, "center_keys": True}


def check(text, dialect, fields):
    row = parse_row(text, dialect)
    assert row.name == text and row.digest is None
    scales = SCALES if row.needs_scales else None
    assert row.recipe(scales) == Recipe(**fields, **({"scales": scales} if scales else {}))
    return row


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("fp8", {"kv_cache": "fp8"}),
        ("fp8_e4m3", {"kv_cache": "fp8"}),
        ("fp8_e5m2", {"kv_cache": "fp8_e5m2"}),
        ("fp8+head", {"kv_cache": {"granularity": "head"}}),
        ("fp8+token", {"kv_cache": {"granularity": "token"}}),
        ("fp8_e5m2+token", {"kv_cache": {"granularity": "token", "format": "e5m2"}}),
        ("fp8+unit", {"kv_cache": {"scaling": "unit"}}),
        ("fp8+head+unit", {"kv_cache": {"granularity": "head", "scaling": "unit"}}),
        ("fp8+unit+head", {"kv_cache": {"granularity": "head", "scaling": "unit"}}),
        ("fp8+linear", {"kv_cache": "fp8", "linear": "fp8"}),
        ("fp8+unit+linear", {"kv_cache": {"scaling": "unit"}, "linear": "fp8"}),
        (
            "fp8+linear+head+skip=0",
            {"kv_cache": {"granularity": "head"}, "linear": "fp8", "skip_layers": ["0"]},
        ),
        ("fp8+skip=0-3+skip=9", {"kv_cache": "fp8", "skip_layers": ["0-3", "9"]}),
        ("fp8+skip=sliding_window", {"kv_cache": "fp8", "skip_layers": ["sliding_window"]}),
        ("fp8+skip=re:a+b", {"kv_cache": "fp8", "skip_layers": ["re:a+b"]}),
        ("fp8+skip=re:.+linear", {"kv_cache": "fp8", "skip_layers": ["re:.+linear"]}),
        (r"fp8+skip=re:\d+head", {"kv_cache": "fp8", "skip_layers": [r"re:\d+head"]}),
        ("auto+linear", {"linear": "fp8"}),
    ],
)
def test_rows_of_the_engine(text, fields):
    assert not check(text, ENGINE, fields).is_plain


def test_prompts_may_have_an_implementation_of_their_own():
    plain = parse_row("auto+prefill=reference", ENGINE)
    assert plain.is_plain and plain.recipe() is None and plain.prefill_impl == "reference"
    fp8 = parse_row("fp8+unit+skip=0+prefill=mine", ENGINE)
    assert fp8.recipe() == Recipe(kv_cache={"scaling": "unit"}, skip_layers=["0"])
    assert fp8.prefill_impl == "mine" and parse_row("auto", ENGINE).prefill_impl is None


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("unit", {"kv_cache": {"scaling": "unit"}}),
        ("tensor", {"kv_cache": {"scaling": "static"}}),
        ("head", {"kv_cache": STATIC_HEAD}),
        ("token", {"kv_cache": {"granularity": "token"}}),
        ("head+rotate", {"kv_cache": STATIC_HEAD | ROTATED}),
        ("head+center+rotate", {"kv_cache": STATIC_HEAD | CENTERED}),
        ("token+rotate", {"kv_cache": {"granularity": "token"} | ROTATED}),
        ("token+center", {"kv_cache": {"granularity": "token", "center_keys": True}}),
        ("unit+rotate", {"kv_cache": {"scaling": "unit"} | ROTATED}),
        ("unit+promote=none", {"kv_cache": {"scaling": "unit"}, "promote_every": None}),
        (
            "unit+rotate+promote=4+skip=0",
            {"kv_cache": {"scaling": "unit"} | ROTATED, "promote_every": 4, "skip_layers": ["0"]},
        ),
        (
            "token+skip=1+skip=3",
            {"kv_cache": {"granularity": "token"}, "skip_layers": ["1", "3"]},
        ),
    ],
)
def test_rows_of_language_models(text, fields):
    check(text, LANGUAGE, fields)
    other = parse_row(text, LANGUAGE, kv_cache_dtype="fp8_e5m2")
    assert other.kv_cache == parse_row(text, LANGUAGE).kv_cache.model_copy(
        update={"format": "e5m2"}
    )


@pytest.mark.parametrize(
    ("text", "needed"),
    [("tensor", True), ("head", True), ("token", False), ("unit", False), ("token+center", True)],
)
def test_rows_say_whether_they_need_scales(text, needed):
    row = parse_row(text, LANGUAGE)
    assert row.needs_scales == needed
    if needed:
        with pytest.raises(ConfigError, match=re.escape(f"row {text}: ") + ".*needs scales"):
            row.recipe()


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("fp8", {"linear": "fp8"}),
        ("attention", {"attention": "fp8"}),
        ("fp8+attention", {"linear": "fp8", "attention": "fp8"}),
        ("attention=head+fp8", {"linear": "fp8", "attention": {"granularity": "head"}}),
        ("attention=tensor", {"attention": {"granularity": "tensor"}}),
        ("fp8+block", {"linear": BLOCK}),
        ("block", {"linear": BLOCK}),
        ("tensor", {"linear": TENSOR}),
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
        ("text_encoder+ignore=ff", {"text_encoder": "fp8", "ignored_layers": ["ff"]}),
        ("attention+skip=attn2", {"attention": "fp8", "skip_layers": ["attn2"]}),
    ],
)
def test_rows_of_images(text, fields):
    row = parse_row(text, IMAGES)
    assert row.recipe() == Recipe(**fields) and not row.needs_scales


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("linear", {"linear": "fp8"}),
        ("attention", {"attention": "fp8"}),
        ("linear+attention", {"linear": "fp8", "attention": "fp8"}),
        (
            "linear+attention+modulation",
            {"linear": "fp8", "attention": "fp8", "weight_only_layers": ["modulation"]},
        ),
        ("linear-block", {"linear": BLOCK}),
        ("linear-static", {"linear": {"scaling": "static"}}),
        ("linear-static+attention", {"linear": {"scaling": "static"}, "attention": "fp8"}),
        (
            "linear-static+attention-static",
            {"linear": {"scaling": "static"}, "attention": {"scaling": "static"}},
        ),
    ],
)
def test_rows_of_a_diffusion_step(text, fields):
    check(text, DIFFUSION, fields)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("dynamic", {"vision_attention": "fp8"}),
        ("static", {"vision_attention": {"scaling": "static"}}),
        ("fused-bf16", {"vision_attention": "bf16"}),
    ],
)
def test_rows_of_vision_towers(text, fields):
    check(text, VISION, fields)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("fp8", {"scaling": "static"}),
        ("fp8-head", STATIC_HEAD),
        ("fp8-unit", {"scaling": "unit"}),
        ("fp8-token", {"granularity": "token"}),
    ],
)
def test_rows_of_a_token_after_a_long_context(text, settings):
    check(text, GENERATE, {"kv_cache": settings})


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        *((text, dialect) for text in PLAIN for dialect in (CANONICAL, ENGINE, IMAGES, VISION)),
        ("bf16-faster", DIFFUSION),
        ("stock", GENERATE),
    ],
)
def test_a_plain_row_quantizes_nothing(text, dialect):
    row = parse_row(text, dialect)
    assert row == Row(text) and row.is_plain and not row.needs_scales
    assert row.recipe() is row.recipe(SCALES) is row.kv_cache is row.linear is None


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("kv", {"kv_cache": "fp8"}),
        ("kv=head,static", {"kv_cache": STATIC_HEAD}),
        ("kv=head+kv=static", {"kv_cache": STATIC_HEAD}),
        ("kv=token,e5m2", {"kv_cache": {"granularity": "token", "format": "e5m2"}}),
        ("kv=checkpoint,tensor,e4m3", {"kv_cache": "fp8"}),
        ("kv=head,static,rotate,center", {"kv_cache": STATIC_HEAD | CENTERED}),
        ("linear", {"linear": "fp8"}),
        ("linear=tensor", {"linear": TENSOR}),
        ("linear=weights", {"linear": {"activation": None}}),
        ("linear=static+scales=s.json", {"linear": {"scaling": "static"}, "scales": "s.json"}),
        ("kv+linear=block+skip=0", {"kv_cache": "fp8", "linear": BLOCK, "skip_layers": ["0"]}),
        ("attention=head,static", {"attention": STATIC_HEAD}),
        ("vision=bf16", {"vision_attention": "bf16"}),
        ("vision=head+linear", {"vision_attention": {"granularity": "head"}, "linear": "fp8"}),
        ("bf16+linear", {"linear": "fp8"}),
        ("text_encoder", {"text_encoder": "fp8"}),
        ("kv=unit+promote=none", {"kv_cache": {"scaling": "unit"}, "promote_every": None}),
    ],
)
@pytest.mark.parametrize("dialect", [CANONICAL, ENGINE, LANGUAGE, IMAGES])
def test_the_grammar_holds_everywhere(text, fields, dialect):
    row = parse_row(text, dialect)
    scales = SCALES if row.needs_scales else None
    assert row.recipe(scales) == Recipe(**fields, **({"scales": SCALES} if scales else {}))


def test_a_recipe_file_is_a_row_and_words_change_it(tmp_path):
    path = tmp_path / "a+b.toml"
    recipe = Recipe(kv_cache={"granularity": "token"}, skip_layers=["0"])
    recipe.save(path)
    for dialect in (CANONICAL, ENGINE, LANGUAGE, IMAGES, DIFFUSION, VISION, GENERATE):
        row = parse_row(str(path), dialect)
        assert row.recipe() == recipe and re.fullmatch("[0-9a-f]{12}", row.digest)
    more = parse_row(f"{path}+skip=2+linear=block+prefill=mine", ENGINE)
    assert more.recipe() == recipe.replace(skip_layers=["0", "2"], linear=BLOCK)
    assert more.prefill_impl == "mine" and more.digest == row.digest
    # What is said of the cache is added to what the file says.
    assert parse_row(f"{path}+kv=rotate").recipe().kv_cache.rotate_keys
    assert parse_row(f"{path}+kv=rotate").recipe().kv_cache.granularity == "token"
    Recipe().save(path)
    plain = parse_row(str(path), ENGINE)
    assert plain.recipe() == Recipe() and not plain.is_plain and plain.digest != row.digest
    with pytest.raises(ConfigError, match="skip_layers needs quantized attention or kv_cache"):
        parse_row(f"{path}+skip=1", ENGINE)
    with pytest.raises(ConfigError, match=r"row .*none.json: .*none.json"):
        parse_row(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("text", "dialect", "message"),
    [
        ("", CANONICAL, r"expected words out of bf16, .*kv\[=tensor.*; got ''"),
        ("int8", CANONICAL, "got 'int8'"),
        ("kv+int8", CANONICAL, r"got 'kv\+int8'"),
        ("kv=int8", CANONICAL, "row kv=int8: expected values of kv out of tensor, .*got 'int8'"),
        ("kv=head,token", CANONICAL, "one value of kv, got head and token"),
        ("kv=token,unit", CANONICAL, "'token' and scaling 'dynamic' go together"),
        ("linear=block,tensor", CANONICAL, "one value of linear, got block and tensor"),
        ("linear=block,static", CANONICAL, "one value of linear, got block and static"),
        ("kv=", CANONICAL, "got 'kv='"),
        ("kv+bf16", CANONICAL, "got 'bf16'"),
        ("bf16+kv", CANONICAL, "bf16 quantizes nothing: kv cannot follow it"),
        ("bf16+auto", CANONICAL, "got 'auto'"),
        ("skip=0", CANONICAL, "row skip=0: skip_layers needs quantized attention"),
        ("vision=bf16,head", CANONICAL, "row vision=bf16,head: "),
        ("scales=a.json+scales=b.json", CANONICAL, "expected scales once, got a.json and b.json"),
        ("kv+scales=a.json", CANONICAL, "nothing has scaling 'static'"),
        ("kv+promote=0", CANONICAL, "promote=none or a number of tiles, got '0'"),
        # The engine's
        ("fp4", ENGINE, "got 'fp4'"),
        ("auto+skip=0", ENGINE, "auto quantizes nothing: skip cannot follow it"),
        ("auto+head", ENGINE, "auto quantizes nothing: kv cannot follow it"),
        ("auto+linear+head", ENGINE, "kv cannot follow it"),
        ("auto+linear+skip=0", ENGINE, "skip cannot follow it"),
        ("auto+linear+linear", ENGINE, "each word once, got linear 2 times"),
        ("fp8+", ENGINE, r"got 'fp8\+'"),
        ("fp8+head+token", ENGINE, "one value of kv, got head and token"),
        ("fp8+token+unit", ENGINE, "'token' and scaling 'dynamic' go together"),
        ("fp8+x", ENGINE, r"expected words out of .*fp8, .*got 'fp8\+x'"),
        ("baseline+prefill=triton", LANGUAGE, r"got 'baseline\+prefill=triton'"),
        ("auto+prefill=", ENGINE, "got 'prefill='"),
        # Those of language models
        ("int8", LANGUAGE, "unit, tensor, head, token.*got 'int8'"),
        ("baseline+skip=1", LANGUAGE, "baseline quantizes nothing: skip cannot follow it"),
        ("baseline+rotate", LANGUAGE, "baseline quantizes nothing"),
        ("baseline+promote=none", LANGUAGE, "baseline quantizes nothing"),
        ("unit+center", LANGUAGE, "row unit.center: .*center_keys takes the means"),
        ("head+turn", LANGUAGE, r"got 'head\+turn'"),
        ("head+rotate+rotate", LANGUAGE, "each word once, got rotate 2 times"),
        ("unit+promote=1+promote=2", LANGUAGE, "expected promote once, got 1 and 2"),
        ("nowhere.json+rotate", LANGUAGE, "nowhere.json"),
        # Those of images
        ("fp8+bf16", IMAGES, "got 'bf16'"),
        ("fp8+", IMAGES, r"got 'fp8\+'"),
        ("static", IMAGES, "got 'static'"),
        ("fp8+ignore", IMAGES, "got 'ignore'"),
        ("fp8+ignore=", IMAGES, "got 'ignore='"),
        ("fp8=", IMAGES, "got 'fp8='"),
        ("fp8=channel", IMAGES, "fp8 without a value, got fp8=channel"),
        ("fp8+fp8", IMAGES, "each word once, got fp8 2 times"),
        ("block+tensor", IMAGES, "one value of linear, got block and tensor"),
        ("block+static=s.json", IMAGES, "one value of linear, got block and static"),
        ("attention=row", IMAGES, "attention out of tensor, head, static; got 'row'"),
        ("attention+ignore=ff", IMAGES, "row attention.ignore=ff: .*needs quantized linear"),
        ("fp8+skip=attn", IMAGES, "skip_layers needs quantized attention"),
        # Words that a workload does not have
        ("stock", ENGINE, "got 'stock'"),
        ("kv", DIFFUSION, "got 'kv'"),
        ("dynamic", DIFFUSION, "got 'dynamic'"),
        ("vision", GENERATE, "got 'vision'"),
        ("kv", VISION, "got 'kv'"),
    ],
)
def test_wrong_rows_are_one_sentence(text, dialect, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_row(text, dialect)
    assert str(caught.value).startswith(f"row {text}: ") and "\n" not in str(caught.value)


def test_rows_differ():
    assert [row.name for row in parse_rows(["bf16", "kv"])] == ["bf16", "kv"]
    for texts in ([], ["kv", "kv"]):
        with pytest.raises(ConfigError, match="expected different rows"):
            parse_rows(texts)
    with pytest.raises(ConfigError, match="expected a KV cache dtype, .* got 'int8'"):
        parse_rows(["kv"], kv_cache_dtype="int8")


def test_rows_with_other_recipes_and_more_layers_to_skip():
    row = parse_row("fp8+skip=0", ENGINE)
    assert row.skipping(["1"]).recipe().skip_layers == ("0", "1") and row.skipping([]) is row
    for text in ("auto", "auto+linear"):
        assert parse_row(text, ENGINE).skipping(["1"]) == parse_row(text, ENGINE)
    static = Recipe(kv_cache={"scaling": "static"}, scales=SCALES)
    changed = row.using(static)
    assert changed.name == row.name and changed.recipe() == static and not changed.needs_scales
    assert Row.of("r", static).recipe() == static and Row.of("plain", None).is_plain
    assert row.kv_cache.scaling == "checkpoint" and row.linear is None
    assert parse_row("linear=block").linear.weight == "block 128x128"


def test_the_plain_row_of_a_dtype():
    assert [plain_row(name) for name in ("bfloat16", "float16")] == ["bf16", "fp16"]
    with pytest.raises(ConfigError, match="bfloat16, float16, float32, got 'auto'"):
        plain_row("auto")


def test_the_help_has_every_word():
    for dialect in (ENGINE, LANGUAGE, IMAGES, DIFFUSION, VISION, GENERATE):
        text = describe_words(dialect)
        for word, meaning in dialect.words.items():
            assert f"{word.rstrip('=')} ({meaning})" in text
        assert all(word in text for word in (*PLAIN, *dialect.plain))
    assert all(name in describe_words(CANONICAL) for name in WORDS)
    assert "attention[=" not in describe_words(GENERATE) and "kv[=tensor|" in describe_words(ENGINE)
