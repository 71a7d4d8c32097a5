"""Answers that follow a JSON schema, a regular expression or a list of choices.

The grammars are llguidance's: one wheel of 3 MB for every Python, for x86_64 and aarch64, that
needs no other package (xgrammar needs transformers and triton, outlines-core has no context-free
grammars). It maps a tokenizer's pieces to bytes, and refuses a schema that it cannot enforce.
"""

import json
from collections.abc import Mapping, Sequence
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
OBJECT = {"type": "object"}


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
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"expected a JSON schema, got no JSON: {error}") from error
        if not isinstance(schema, Mapping):
            raise ConfigError(f"expected a JSON schema as an object, got {type(schema).__name__}")
        strict: Any = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": WHITESPACE}
        try:
            text = _llguidance().LLMatcher.grammar_from_json_schema(dict(schema), overrides=strict)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"expected a JSON schema, got {error}") from error
        return cls._make("JSON schema", text, tokenizer, eos_tokens)

    @classmethod
    def json_object(cls, tokenizer: Any, *, eos_tokens: Sequence[int] | None = None) -> Self:
        """Any JSON object."""
        return cls.from_json_schema(OBJECT, tokenizer, eos_tokens=eos_tokens)

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
        is_error, messages = library.LLMatcher.validate_grammar_with_warnings(
            text, vocabulary, limits=limits
        )
        if is_error or messages:  # a warning is a part that it would leave out
            raise ConfigError(f"expected a {what} that can be enforced, got {'; '.join(messages)}")
        matcher = library.LLMatcher(vocabulary, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise ConfigError(f"expected a {what} that can be enforced, got {matcher.get_error()}")
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
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": _moved(arguments, f"#/anyOf/{index}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, (name, arguments) in enumerate(tools.items())
    ]
    return {"anyOf": calls}


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references to its own parts still hold when it is a part itself."""
    match schema:
        case {"$ref": str(reference)} if reference.startswith("#"):
            rest = {key: _moved(value, to) for key, value in schema.items() if key != "$ref"}
            return {"$ref": to + reference[1:], **rest}
        case Mapping():
            return {key: _moved(value, to) for key, value in schema.items()}
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
