"""Tokenizers of several kinds, trained on a few sentences."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from octavo_testkit.models import text_models

SENTENCES = (
    "The cache holds the keys and values of every token that was seen.",
    "Eight bits are enough for most of them, if the scales are right.",
    "Ünïcödé wörds häve möre bytes – naïve café, 日本語のテキスト, Ελληνικά.",
)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
EOS = SPECIAL.index("</s>")


def byte_level():
    """Bytes and pairs of them, in transformers' wrapper: the one of the small decoders."""
    return text_models.make_tokenizer()


def byte_level_with_eos():
    """The same kind with an EOS token, bare."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def metaspace():
    """Pieces with a mark for a space, as sentencepiece has them; what is unknown is lost."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def byte_fallback():
    """Llama 2's kind: marks for spaces, and bytes for every character that is not a piece."""
    pieces = ["\N{LOWER ONE EIGHTH BLOCK}", *"abcdefghijklmnopqrstuvwxyz", *'0123456789{}[]":,.-']
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [(pieces[0], letter) for letter in "abcthe"]
    names += [first + second for first, second in merges]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(pieces[0]), normalizers.Replace(" ", pieces[0])]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(pieces[0], " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_piece():
    """Words and their ends, "##" before an end; spaces between words come from the decoder."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def words():
    """The chart reader's kind: whole words with no decoder, which then stand a space apart."""
    names = [*SPECIAL, "red", "blue", "bar", "1", "2", "."]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer
