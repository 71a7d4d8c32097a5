"""Rows: the one grammar for "a recipe to compare", in every benchmark and evaluation.

    ROW := PLAIN[+WORD]… | WORD[+WORD]… | FILE[+WORD]…

A row is a plain word, which quantizes nothing (`PLAIN`), words that say what is quantized
(`WORDS`), or the .toml or .json file of a recipe, which words may change. `kv=head,static` and
`kv=head+kv=static` are the same row; the second form fits into lists with commas. A workload also
understands its own older words, which a `Dialect` spells out: `fp8+head` of the engine is
`kv+kv=head`. Whether a combination makes sense is up to `Recipe`.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError

if TYPE_CHECKING:  # the help of commands needs the words alone, and pydantic takes its time
    from octavo.recipe import KvCacheSettings, LinearSettings, Recipe

# Words that quantize nothing -> the dtype that they ask for; None is the model's own.
PLAIN: Mapping[str, str | None] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "auto": None,
    "baseline": None,
}
AFTER_PLAIN = ("linear", "prefill")  # the words that may follow a plain one
RECIPE_FILES = (".json", ".toml")
FORMATS = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}  # of --kv-cache-dtype


@dataclass(frozen=True)
class Word:
    """A word of the grammar.

    recipe_field: the field of the recipe that it sets, if any. values: what may follow the equals
    sign, and the settings that it makes; is_single: whether only one may. operand: stands for any
    text after the equals sign.
    """

    recipe_field: str | None
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_single: bool = False
    operand: str | None = None

    @property
    def is_repeatable(self) -> bool:
        """Whether a row may say it more than once."""
        return self.operand == "PATTERN"

    def usage(self, name: str) -> str:
        """How the word is written, such as "attention[=tensor|head|static]"."""
        if self.operand is not None:
            return f"{name}={self.operand}"
        more = "" if self.is_single else ",…"
        return f"{name}[={'|'.join(self.values)}{more}]" if self.values else name


_SCALES = {name: {"granularity": name} for name in ("tensor", "head")}
_STATIC = {"static": {"scaling": "static"}}
# docs/reference/rows.md says what each of them means.
WORDS: Mapping[str, Word] = {
    "kv": Word(
        "kv_cache",
        {
            **_SCALES,
            "token": {"granularity": "token"},
            "checkpoint": {"scaling": "checkpoint"},
            **_STATIC,
            "unit": {"scaling": "unit"},
            "e4m3": {"format": "e4m3"},
            "e5m2": {"format": "e5m2"},
            "rotate": {"rotate_keys": True},
            "center": {"center_keys": True},
        },
    ),
    "linear": Word(
        "linear",
        {
            "tensor": {"weight": "tensor", "activation": "tensor"},
            "block": {"weight": "block 128x128"},
            "weights": {"activation": None},
            **_STATIC,
        },
        is_single=True,
    ),
    "attention": Word("attention", {**_SCALES, **_STATIC}),
    "vision": Word("vision_attention", {**_SCALES, **_STATIC, "bf16": {"dtype": "bf16"}}),
    "text_encoder": Word("text_encoder"),
    "ignore": Word("ignored_layers", operand="PATTERN"),
    "include": Word("included_layers", operand="PATTERN"),
    "weight_only": Word("weight_only_layers", operand="PATTERN"),
    "skip": Word("skip_layers", operand="PATTERN"),
    "promote": Word("promote_every", operand="TILES"),
    "scales": Word("scales", operand="FILE"),
    "prefill": Word(None, operand="IMPL"),
}


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The older words of a workload, each with what it means in the words of the grammar.

    A word that ends in "=" takes a value, which ends its meaning. plain: further words that
    quantize nothing. takes: the words of the grammar that the workload can run; () is all.
    """

    words: Mapping[str, str] = field(default_factory=dict)
    plain: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """Every word by its name, with how it is written."""
        found = {word: word for word in (*PLAIN, *self.plain)}
        for word, meaning in self.words.items():
            name, equals, _ = word.partition("=")
            last = meaning.rpartition("+")[2].rstrip("=")  # takes the value
            found[name] = WORDS[last].usage(name) if equals else name
        known = self.takes or WORDS
        return {**found, **{name: WORDS[name].usage(name) for name in WORDS if name in known}}


CANONICAL = Dialect()
_LINEAR_PATTERNS = ("ignore", "include", "weight_only")
ENGINE = Dialect(
    words={"fp8": "kv", "fp8_e4m3": "kv=e4m3", "fp8_e5m2": "kv=e5m2"}
    | {word: f"kv={word}" for word in ("head", "token", "unit")}
)
LANGUAGE = Dialect(  # perplexity, needles, MRCR, choice and math
    words={"unit": "kv=unit", "tensor": "kv=tensor,static", "head": "kv=head,static"}
    | {word: f"kv={word}" for word in ("token", "rotate", "center")},
    takes=tuple(word for word in WORDS if word != "prefill"),  # no evaluation chooses it
)
IMAGES = Dialect(
    words={"fp8": "linear"}
    | {word: f"linear={word}" for word in ("tensor", "block", "weights")}
    | {"static=": "linear=static+scales="}
)
DIFFUSION = Dialect(
    words={
        "modulation": "weight_only=modulation",
        "linear-block": "linear=block",
        "linear-static": "linear=static",
        "attention-static": "attention=static",
    },
    plain=("bf16-faster",),
    takes=("linear", "attention", *_LINEAR_PATTERNS, "skip", "promote", "scales"),
)
VISION = Dialect(  # ChartQA and whole vision towers
    words={"dynamic": "vision", "static": "vision=static", "fused-bf16": "vision=bf16"},
    takes=("vision", "skip", "promote", "scales"),
)
GENERATE = Dialect(
    words={
        "fp8": "kv=tensor,static",
        "fp8-head": "kv=head,static",
        "fp8-unit": "kv=unit",
        "fp8-token": "kv=token",
    },
    plain=("stock",),
    takes=("kv", "linear"),
)


@dataclass(frozen=True)
class Row:
    """A recipe to compare, by the name that was asked for.

    fields: those of the recipe; without any, nothing is quantized. prefill_impl: attention of
    prompts by this implementation. digest: of the file that the recipe came from, if it did.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    prefill_impl: str | None = None
    digest: str | None = None

    @staticmethod
    def of(name: str, recipe: "Recipe | None") -> "Row":
        """The row of a recipe; None quantizes nothing."""
        return Row(name, {} if recipe is None else dict(recipe))

    @property
    def is_plain(self) -> bool:
        """Whether the row leaves the model as it is."""
        return not self.fields

    @property
    def needs_scales(self) -> bool:
        """Whether the row takes scales, or the means of keys, that it does not have yet."""
        return not self.is_plain and _is_static(self.fields) and self.fields.get("scales") is None

    @property
    def kv_cache(self) -> "KvCacheSettings | None":
        """What the row says of the KV cache."""
        from octavo.recipe import KvCacheSettings

        return KvCacheSettings.read(self.fields.get("kv_cache"))

    @property
    def linear(self) -> "LinearSettings | None":
        """What the row says of linear layers."""
        from octavo.recipe import LinearSettings

        return LinearSettings.read(self.fields.get("linear"))

    def recipe(self, scales: object = None) -> "Recipe | None":
        """The recipe; None of a plain row. scales: those that the row still needs, if it does."""
        from octavo.recipe import Recipe

        if self.is_plain:
            return None
        own = {"scales": scales} if scales is not None and self.needs_scales else {}
        with _named(self.name):
            return Recipe(**{**self.fields, **own})

    def using(self, recipe: "Recipe") -> "Row":
        """This row with another recipe, such as its own with scales."""
        return replace(self, fields=dict(recipe))

    def skipping(self, patterns: Sequence[str]) -> "Row":
        """This row with more attention layers left as they are, where its KV cache is in FP8."""
        if self.kv_cache is None or not patterns:
            return self
        skipped = [*self.fields.get("skip_layers", ()), *patterns]
        return replace(self, fields={**self.fields, "skip_layers": skipped})


def parse_rows(
    texts: Sequence[str], dialect: Dialect = CANONICAL, *, kv_cache_dtype: str = "fp8"
) -> list[Row]:
    """The rows of these texts, one or more, all different; see `parse_row`."""
    if not texts or len(set(texts)) != len(texts):
        raise ConfigError(f"expected different rows, got {list(texts)}")
    return [parse_row(text, dialect, kv_cache_dtype=kv_cache_dtype) for text in texts]


def parse_row(text: str, dialect: Dialect = CANONICAL, *, kv_cache_dtype: str = "fp8") -> Row:
    """The row of a text, which becomes its name; ConfigError says which words there are.

    kv_cache_dtype: the format of a KV cache in FP8 where the text does not say it.
    """
    from octavo.recipe import KvCacheSettings, Recipe

    if kv_cache_dtype not in FORMATS:
        raise ConfigError(
            f"expected a KV cache dtype, one of {', '.join(FORMATS)}, got {kv_cache_dtype!r}"
        )
    with _named(text):
        first, *more = words = _split(text, dialect)
        is_file = first.endswith(RECIPE_FILES) and first.partition("=")[0] not in dialect.names
        is_plain = first in (*PLAIN, *dialect.plain)
        said = _read(more if is_file or is_plain else words, dialect)
        if is_plain and (extra := [name for name, _ in said if name not in AFTER_PLAIN]):
            raise ConfigError(f"{first} quantizes nothing: {', '.join(extra)} cannot follow it")
        fields: dict[str, Any] = dict(Recipe.load(first)) if is_file else {}
        for name in dict.fromkeys(name for name, _ in said):
            word = WORDS[name]
            found = _value(name, [value for own, value in said if own == name])
            if word.is_repeatable:
                found = [*fields.get(str(word.recipe_field), ()), *found]
            elif name == "kv":
                before = KvCacheSettings.read(fields.get("kv_cache"))
                default = {"format": FORMATS[kv_cache_dtype]} if before is None else before
                found = {**dict(default), **found}
            if word.recipe_field is not None:
                fields[word.recipe_field] = found
        digest = hashlib.sha256(Path(first).read_bytes()).hexdigest()[:12] if is_file else None
        if not _is_static(fields):
            Recipe(**fields)  # raises if there is no such one
        return Row(text, fields, dict(said).get("prefill"), digest)


def plain_row(dtype: str) -> str:
    """The plain word for a model in this dtype, such as "bf16" for "bfloat16"."""
    words = {own: word for word, own in PLAIN.items() if own is not None}
    if dtype not in words:
        raise ConfigError(f"expected a dtype, one of {', '.join(words)}, got {dtype!r}")
    return words[dtype]


def describe_words(dialect: Dialect) -> str:
    """How a workload's rows are written, for the help of a flag."""
    words = [f"{word.rstrip('=')} ({meaning})" for word, meaning in dialect.words.items()]
    words += [usage for name, usage in dialect.names.items() if name in WORDS]
    plain = ", ".join((*PLAIN, *dialect.plain))
    shape = f"a plain word ({plain}), WORD[+WORD]… or a recipe's .toml or .json file"
    return f"{shape}. Words: {', '.join(words)}"


def _split(text: str, dialect: Dialect) -> list[str]:
    """The words of a text. A plus inside a path or a pattern belongs to it unless a word follows.

    After `.`, `)`, `]` or a class such as `\\w` a plus repeats what is before it in a pattern.
    """
    names = "|".join(map(re.escape, sorted(dialect.names, key=len, reverse=True)))
    return re.split(rf"(?<![.)\]])(?<!\\[dswDSW])\+(?=(?:{names})(?:[=+]|$))", text)


def _read(words: Sequence[str], dialect: Dialect) -> list[tuple[str, str]]:
    """The words of the grammar that these mean, each with its value, "" where it has none."""
    found: list[tuple[str, str]] = []
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        usage = dialect.names.get(name)
        takes_value = usage is not None and "=" in usage
        must = usage is not None and "[" not in usage and takes_value
        is_plain = name in (*PLAIN, *dialect.plain)
        if usage is None or is_plain or bool(equals) != bool(value) or (must and not value):
            known = ", ".join(dialect.names.values())
            raise ConfigError(f"expected words out of {known}; got {word!r}")
        if value and not takes_value:
            raise ConfigError(f"expected {name} without a value, got {word}")
        if word in words[:i] and not (name in WORDS and WORDS[name].is_repeatable):
            raise ConfigError(f"expected each word once, got {word} {words.count(word)} times")
        meaning = dialect.words.get(name, dialect.words.get(f"{name}="))
        parts = [word] if meaning is None else (meaning + value).split("+", meaning.count("+"))
        found += [(own, its) for own, _, its in (part.partition("=") for part in parts)]
    return found


def _value(name: str, values: Sequence[str]) -> Any:
    """What a recipe's field gets of a word that was said with these values."""
    word = WORDS[name]
    if word.is_repeatable:
        return list(values)
    if word.operand is not None:
        if len(values) > 1:
            raise ConfigError(f"expected {name} once, got {' and '.join(values)}")
        if name != "promote":
            return values[0]
        if values[0] != "none" and (not values[0].isdecimal() or int(values[0]) < 1):
            raise ConfigError(f"expected promote=none or a number of tiles, got {values[0]!r}")
        return None if values[0] == "none" else int(values[0])
    settings: dict[str, Any] = {}
    said: dict[str, str] = {}  # which value made which setting
    for value in (part for text in values for part in text.split(",") if text):
        if value not in word.values:
            known = ", ".join(word.values)
            raise ConfigError(f"expected values of {name} out of {known}; got {value!r}")
        made = word.values[value]
        for setting in ("all",) if word.is_single else made:
            if said.setdefault(setting, value) != value:
                raise ConfigError(
                    f"expected one value of {name}, got {said[setting]} and {value}: they exclude "
                    "each other"
                )
        settings |= made
    return settings or ({} if name == "kv" else "fp8")


def _is_static(fields: Mapping[str, Any]) -> bool:
    """Whether a recipe of these fields takes scales."""
    from octavo.recipe import Recipe

    one = {"layer": {"q": 1.0, "k": 1.0, "v": 1.0}}
    try:
        return Recipe(**{**fields, "scales": one}).is_static
    except ConfigError:
        return False


@contextmanager
def _named(text: str) -> Iterator[None]:
    """Let errors say which row they are about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"row {text}: {error}") from None
