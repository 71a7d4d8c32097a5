"""Answers that follow a JSON schema, a regular expression or a list of choices.

The grammars are llguidance's: one wheel of 3 MB for every Python, for x86_64 and aarch64, that
needs no other package (xgrammar needs transformers and triton, outlines-core has no context-free
grammars). It maps a tokenizer's pieces to bytes, and refuses a schema that it cannot enforce.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from octavo.errors import ConfigError, UnsupportedError
from octavo.extras import need

if TYPE_CHECKING:
    import torch
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor

# A weak model writes spaces for ever where any number of them may stand.
WHITESPACE = r"[ \n\t\r]{0,16}"
# Keywords that say more about the same value, with one schema, several, or several by name.
SAME_VALUE = ("$ref", "allOf", "anyOf", "oneOf", "then", "else", "dependentSchemas")
# Keywords with schemas of the value's parts.
PARTS = ("items", "prefixItems", "properties", "patternProperties", "additionalProperties")
DEFINITIONS = ("$defs", "definitions")
SAYS_OTHERWISE = ("additionalProperties", "unevaluatedProperties")


@dataclass(frozen=True, eq=False)
class Grammar:
    """What an answer must follow; made once, it starts any number of answers.

    Made for one tokenizer: a byte-level one, or one with bytes for what it has no piece for, of
    transformers or of tokenizers. eos_tokens end an answer, and only where it is complete; None
    takes the tokenizer's own. No other special token is ever allowed. Making one takes a second for
    the first grammar of a large tokenizer, milliseconds afterwards; threads may share it.
    """

    vocab_size: int
    _matcher: "LLMatcher" = field(repr=False)

    @classmethod
    def from_json_schema(
        cls,
        schema: Mapping[str, Any] | str,
        tokenizer: Any,
        *,
        eos_tokens: Sequence[int] | None = None,
    ) -> Self:
        """JSON that a schema, or its text, accepts; keys come in the schema's order.

        Up to 16 spaces or line ends may stand between two parts. A schema that cannot be enforced
        to the letter is a ConfigError that names what is in the way.
        """
        strict: Any = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": WHITESPACE}
        try:
            found: Any = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(found, Mapping):
                raise TypeError(f"{type(found).__name__} in place of an object")
            text = _llguidance().LLMatcher.grammar_from_json_schema(dict(found), overrides=strict)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"expected a JSON schema, got {error}") from error
        return cls._make("JSON schema", text, tokenizer, eos_tokens)

    @classmethod
    def from_regex(
        cls, regex: str, tokenizer: Any, *, eos_tokens: Sequence[int] | None = None
    ) -> Self:
        r"""Text that a regular expression matches as a whole; no look-around, no back-references.

        \d is 0-9 and \w a-z, A-Z, 0-9 and _, as in JSON schemas.
        """
        library = _llguidance()
        if (len(regex) - len(regex.rstrip("\\"))) % 2:  # which it would drop
            raise ConfigError(f"expected a regular expression, got a backslash at the end: {regex}")
        rule = library.regex_to_lark(regex, "dw")
        text = library.LLMatcher.grammar_from_lark(f"start: /{rule}/")
        return cls._make("regular expression", text, tokenizer, eos_tokens)

    @classmethod
    def from_choices(
        cls, choices: Sequence[str], tokenizer: Any, *, eos_tokens: Sequence[int] | None = None
    ) -> Self:
        """One of several texts."""
        is_text = isinstance(choices, str) or not all(isinstance(one, str) for one in choices)
        if is_text or not choices:
            raise ConfigError(f"expected choices, one text or more, got {choices!r}")
        rule = " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)
        text = _llguidance().LLMatcher.grammar_from_lark(f"start: {rule}")
        return cls._make("list of choices", text, tokenizer, eos_tokens)

    @classmethod
    def _make(cls, what: str, text: str, tokenizer: Any, eos_tokens: Sequence[int] | None) -> Self:
        if eos_tokens is None:
            own = getattr(tokenizer, "eos_token_id", None)
            eos_tokens = () if own is None else (own,)
        if not eos_tokens:
            raise ConfigError(
                "expected a token that ends an answer, got a tokenizer without one: give eos_tokens"
            )
        library = _llguidance()
        vocabulary = _vocabulary(tokenizer, tuple(eos_tokens))
        limits = library.LLParserLimits(verbose_errors=False)
        # A warning is a part that it would leave out.
        _, messages = library.LLMatcher.validate_grammar_with_warnings(
            text, vocabulary, limits=limits
        )
        matcher = library.LLMatcher(vocabulary, text, log_level=0, limits=limits)
        if matcher.is_error() or messages:
            problem = "; ".join(messages) or matcher.get_error()
            raise ConfigError(f"expected a {what} that can be enforced, got {problem}")
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():  # a schema that is nothing but a reference to itself, for instance
            raise ConfigError(f"expected a {what} that an answer can follow, got one that none can")
        return cls(vocabulary.vocab_size, matcher)

    def start(self) -> "GrammarState":
        """A new answer."""
        return GrammarState(self._matcher.deep_copy(), self.vocab_size)


class GrammarState:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher, self._num_words = matcher, -(-vocab_size // 32)

    def allowed(self, device: "torch.device | str") -> "Tensor":
        """The tokens that may come next: int32 [ceil(vocab / 32)], a bit each, lowest first.

        `SamplerRow.allowed` takes it. Where the answer is finished it is the EOS tokens alone. On
        "cpu" the sampler moves the masks of a batch at once.
        """
        import torch  # not at the top: processes that only compile grammars do without

        mask = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise UnsupportedError(f"the grammar is too complex: {self._matcher.get_error()}")
        return torch.frombuffer(mask, dtype=torch.int32)[: self._num_words].to(device)

    def advance(self, token: int) -> None:
        """Take the token that came; one that was not allowed is a ConfigError, for good."""
        if not self._matcher.consume_token(token):
            error = self._matcher.get_error()
            raise ConfigError(f"expected a token that the grammar allows, got {token}: {error}")

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing but EOS can follow, or EOS came."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


def tool_call_schema(tools: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of {"name": one of the tools, "arguments": what its own schema accepts}."""
    if not tools:
        raise ConfigError("expected one tool or more, got none")
    calls = []
    for index, (name, schema) in enumerate(tools.items()):
        arguments = _moved(schema, f"#/anyOf/{index}/properties/arguments")
        call: dict[str, Any] = {"properties": {"name": {"const": name}, "arguments": arguments}}
        call |= {"required": ["name", "arguments"], "additionalProperties": False}
        calls.append({"type": "object", **call})
    return {"anyOf": calls}


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references to its own parts still hold when it is a part itself."""
    match schema:
        case Mapping():
            moved = {key: _moved(value, to) for key, value in schema.items()}
            if str(moved.get("$ref", "")).startswith("#"):
                moved["$ref"] = to + moved["$ref"][1:]
            return moved
        case list():
            return [_moved(value, to) for value in schema]
    return schema


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, eos_tokens: tuple[int, ...]) -> "LLTokenizer":
    """A tokenizer as llguidance knows it; kept, for a large one takes a second."""
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    if not hasattr(backend, "to_str"):
        raise UnsupportedError(
            f"guided decoding needs a fast tokenizer, got {type(tokenizer).__name__}"
        )
    try:
        made: LLTokenizer = _llguidance().LLTokenizer(backend.to_str(), eos_token=list(eos_tokens))
    except ValueError as error:
        raise UnsupportedError(f"guided decoding cannot use this tokenizer: {error}") from error
    return made


def _llguidance() -> Any:
    need("guided decoding", "llguidance")
    import llguidance

    return llguidance


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with additionalProperties false wherever an object declares properties.

    Objects that say themselves what else they may have stay as they are, and so do those whose
    properties are declared in several places (allOf, a $ref beside properties): each place would
    forbid what the others declare.
    """
    closed: dict[str, Any] = copy.deepcopy(dict(schema))
    found: dict[int, tuple[dict[str, Any], bool]] = {}
    _find_shared(closed, closed, False, found)
    for one, is_shared in found.values():
        if not is_shared and "properties" in one and not one.keys() & set(SAYS_OTHERWISE):
            one["additionalProperties"] = False
    return closed


def _find_shared(
    schema: Any, root: Any, is_part: bool, found: dict[int, tuple[dict[str, Any], bool]]
) -> None:
    """Note, by id, whether a schema is one of several that declare the properties of an object."""
    if not isinstance(schema, dict):
        return
    same = list(_schemas(schema, SAME_VALUE, root))
    num_places = ("properties" in schema) + sum(_declares(one, root, set()) for one in same)
    # Alternatives exclude each other, unless something is declared beside them.
    is_choice = list(schema.keys() & {"properties", *SAME_VALUE}) in (["anyOf"], ["oneOf"])
    is_several = is_part or (num_places > 1 and not is_choice)
    if id(schema) in found and found[id(schema)][1] in (True, is_several):
        return
    found[id(schema)] = schema, is_several
    for one in same:
        _find_shared(one, root, is_several, found)
    for one in _schemas(schema, (*PARTS, *DEFINITIONS), root):
        _find_shared(one, root, False, found)


def _declares(schema: Any, root: Any, seen: set[int]) -> bool:
    """Whether a schema has properties, its own or of others that it refers to."""
    if not isinstance(schema, Mapping) or id(schema) in seen:  # a $ref may lead back
        return False
    seen.add(id(schema))
    same = _schemas(schema, SAME_VALUE, root)
    return "properties" in schema or any(_declares(one, root, seen) for one in same)


def _schemas(schema: Mapping[str, Any], keywords: tuple[str, ...], root: Any) -> Iterator[Any]:
    """The schemas below these keywords."""
    for keyword in keywords:
        match schema.get(keyword):
            case str(reference):
                yield _target(reference, root)
            case list(several):
                yield from several
            case Mapping() as found:
                is_one = keyword in ("items", "additionalProperties", "then", "else")
                yield from [found] if is_one else found.values()


def _target(reference: str, root: Any) -> Any:
    """What a $ref in the same document points to; None if it is not there."""
    found = root if reference.startswith("#") else None
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        match found:
            case Mapping():
                found = found.get(name)
            case list() if name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            case _:
                return None
    return found
