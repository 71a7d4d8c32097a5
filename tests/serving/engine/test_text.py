"""Text streams: joined pieces are the whole text up to the stop text, for all tokenizers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from octavo.errors import ConfigError
from octavo.serving.engine.request import Sampling
from octavo.serving.engine.text import REPLACEMENT, TextDelta, Texts, TextStream
from octavo_testkit.models import tokenizers_of_kinds as kinds

MAKERS = {
    maker.__name__: maker
    for maker in (
        *(kinds.byte_level, kinds.byte_level_with_eos, kinds.metaspace),
        *(kinds.byte_fallback, kinds.word_piece, kinds.words),
    )
}
MADE = {}
TEXTS = st.text(max_size=40) | st.text("the cachéヾ日🙂👩‍👩‍👧 \n.", max_size=40)
UNICODE = ("byte_level", "byte_level_with_eos", "byte_fallback")  # have every character


def made(kind):
    if kind not in MADE:
        MADE[kind] = MAKERS[kind]()
    return MADE[kind]


def bare(tokenizer):
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


def encode(tokenizer, text):
    return bare(tokenizer).encode(text, add_special_tokens=False).ids


def decode(tokenizer, tokens):
    return bare(tokenizer).decode(tokens, skip_special_tokens=True)


def chunks_of(tokens, seed):
    """The tokens in pieces of 0 to 4."""
    generator = random.Random(seed)
    while tokens:
        size = generator.randrange(5)
        yield tokens[:size]
        tokens = tokens[size:]


def stream(tokenizer, tokens, stop=(), seed=None):
    """The pieces of the text, and the delta that stopped it or None."""
    made = TextStream(tokenizer, stop)
    pieces = []
    for chunk in [[token] for token in tokens] if seed is None else chunks_of(tokens, seed):
        delta = made.add(chunk)
        pieces.append(delta.text)
        if delta.is_stopped:
            assert made.finish() == ""
            assert made.add(tokens) == TextDelta("", True)
            return pieces, delta
    return [*pieces, made.finish()], None


@pytest.mark.parametrize("kind", MAKERS)
@given(text=TEXTS, seed=st.integers(0, 99))
def test_joined_pieces_are_the_whole_text(kind, text, seed):
    tokenizer = made(kind)
    tokens = encode(tokenizer, text)
    pieces, _ = stream(tokenizer, tokens, seed=seed)
    assert "".join(pieces) == decode(tokenizer, tokens)
    if kind in UNICODE:
        assert "".join(pieces) == text


@pytest.mark.parametrize("kind", MAKERS)
@given(data=st.data())
def test_joined_pieces_of_any_tokens_are_the_whole_text(kind, data):
    # Special tokens, tokens that only the model has, and bytes that are no characters.
    tokenizer = made(kind)
    size = bare(tokenizer).get_vocab_size()
    ids = st.integers(0, size + 20)
    if kind == "byte_fallback":  # writes a run of bytes anew when one of them is wrong
        ids = ids.filter(lambda token: not 4 <= token < 260)
    tokens = data.draw(st.lists(ids, max_size=60))
    assert "".join(stream(tokenizer, tokens, seed=0)[0]) == decode(tokenizer, tokens)


@pytest.mark.parametrize("kind", UNICODE)
@given(text=TEXTS.filter(lambda text: REPLACEMENT not in text))
def test_no_piece_has_a_part_of_a_character_and_none_waits_longer_than_it_must(kind, text):
    tokenizer = made(kind)
    tokens = encode(tokenizer, text)
    made_stream = TextStream(tokenizer, ())
    so_far = ""
    for count, token in enumerate(tokens, 1):
        so_far += made_stream.add([token]).text
        assert REPLACEMENT not in so_far
        assert text.startswith(so_far)
        if kind != "byte_fallback":
            assert so_far == decode(tokenizer, tokens[:count]).rstrip(REPLACEMENT)


def first_stop(text, stop):
    """Where the stop text begins that is complete first, character by character; or None."""
    for end in range(len(text) + 1):
        starts = [end - len(one) for one in stop if text[:end].endswith(one)]
        if starts:
            return min(starts)
    return None


@pytest.mark.parametrize("kind", MAKERS)
@given(data=st.data(), text=TEXTS, seed=st.none() | st.integers(0, 99))
def test_text_ends_before_the_first_stop_text(kind, data, text, seed):
    tokenizer = made(kind)
    tokens = encode(tokenizer, text)
    text = decode(tokenizer, tokens)
    inside = st.text(max_size=5, min_size=1)
    if text:
        places = st.integers(0, len(text) - 1)
        inside |= st.builds(lambda at, size: text[at : at + size], places, st.integers(1, 5))
    stop = data.draw(st.lists(inside, max_size=3))
    pieces, delta = stream(tokenizer, tokens, stop, seed)
    at = first_stop(text, stop)
    if at is None:
        assert "".join(pieces) == text
        assert delta is None
        return
    assert "".join(pieces) == text[:at]
    if delta is None:  # the text that waited for more tokens has the stop text: U+FFFD
        assert text[at:].endswith(REPLACEMENT)


def test_a_stop_text_holds_back_what_may_be_its_beginning():
    tokenizer = made("byte_level")
    tokens = encode(tokenizer, "x</y</end> more")
    names = [decode(tokenizer, [token]) for token in tokens]
    assert names[:4] == ["x", "<", "/", "y"]
    pieces, delta = stream(tokenizer, tokens, ["</end>"])
    assert pieces[:4] == ["x", "", "", "</y"]
    assert set(pieces[4:]) == {""} and delta.is_stopped


def test_held_text_comes_when_the_answer_ends():
    tokenizer = made("byte_level")
    made_stream = TextStream(tokenizer, ["stop"])
    assert made_stream.add(encode(tokenizer, "a sto")).text == "a "
    assert made_stream.finish() == "sto"
    assert made_stream.finish() == ""
    broken = TextStream(tokenizer, [])
    assert broken.add(encode(tokenizer, "é")[:1]) == TextDelta("")
    assert broken.finish() == REPLACEMENT
    ended = TextStream(tokenizer, [REPLACEMENT])
    assert ended.add(encode(tokenizer, "aé")[:2]) == TextDelta("a")
    assert ended.finish() == ""


def test_a_stop_text_may_come_at_once_or_inside_a_token():
    tokenizer = made("words")  # "red bar blue"
    tokens = encode(tokenizer, "red bar blue")
    assert "".join(stream(tokenizer, tokens, ["red"])[0]) == ""
    assert "".join(stream(tokenizer, tokens, ["bar"])[0]) == "red "  # " " is of the token " bar"
    assert "".join(stream(tokenizer, tokens, [" bar"])[0]) == "red"
    assert "".join(stream(tokenizer, tokens, ["lue", "ar b"])[0]) == "red b"


def test_special_tokens_have_no_text():
    tokenizer = made("metaspace")
    tokens = [kinds.EOS, *encode(tokenizer, "the keys"), kinds.EOS, *encode(tokenizer, "and")]
    pieces, _ = stream(tokenizer, tokens, ["and"])
    assert "".join(pieces) == decode(tokenizer, tokens).removesuffix("and")


def test_wordpiece_and_prefix_spaces():
    assert "".join(stream(made("word_piece"), encode(made("word_piece"), "the keys are"))[0]) == (
        "the keys are"
    )
    tokenizer = made("metaspace")
    pieces, _ = stream(tokenizer, encode(tokenizer, "the keys"))
    assert not pieces[0].startswith(" ")
    assert "".join(pieces) == "the keys"


def test_an_empty_stop_text_is_refused():
    with pytest.raises(ConfigError, match="stop.0: expected at least 1 character"):
        Sampling(stop=("",))


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_decoded = bare(tokenizer), 0

    def decode(self, tokens, skip_special_tokens):
        self.num_decoded += len(tokens)
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token):
        return self.tokenizer.id_to_token(token)

    def get_added_tokens_decoder(self):
        return self.tokenizer.get_added_tokens_decoder()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("what", ["text", "one token", "special", "any", "broken"])
def test_work_for_a_token_does_not_grow(kind, what):
    tokenizer = made(kind)
    size = bare(tokenizer).get_vocab_size()
    broken = encode(tokenizer, "é")[-1:] if kind in UNICODE else [5]
    tokens = {
        "text": encode(tokenizer, "the keys and values 日本 " * 200),
        "one token": [7] * 2000,
        "special": [1] * 2000,
        "any": [random.randrange(size + 20) for _ in range(2000)],
        "broken": broken * 2000,
    }[what]
    counting = Counting(tokenizer)
    pieces, _ = stream(counting, tokens, ["never to be seen"])
    assert counting.num_decoded < 25 * len(tokens)
    if kind != "byte_fallback":
        assert "".join(pieces) == decode(tokenizer, tokens)


@pytest.mark.parametrize("kind", MAKERS)
def test_streams_that_share_texts(kind):
    tokenizer = made(kind)
    texts = Texts(tokenizer)
    generator = random.Random(0)
    vocabulary = range(bare(tokenizer).get_vocab_size() + 3)  # some that only a model has
    for _ in range(200):
        tokens = generator.choices(vocabulary[::7], k=12)
        assert stream(texts, tokens) == stream(tokenizer, tokens)
    assert texts.piece.cache_info().hits > 50
