"""The retrieval model: a SmolLM3 of two layers whose weights are set by hand, not trained.

Its prompts are keys with values behind them, then a question: `<s> ban 17 dor 42 … ? dor`. The next
token is the value, 42. Every number on the way is exact in BF16 and in e4m3, at any length, so that
what is lost is lost by attention's sums. docs/explanation/retrieval-model.md derives the weights.

Layer 0 sees two tokens: a value takes on the code of the key in front of it. Layer 1 sees all: a
key asks for its code. Of each value it learns the share of attention, and of all the rest their
sum, which is 1. Where sums come out too small, the difference is said as `nothing`.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.integrations.embedded_models import RETRIEVAL_MODEL
from octavo.integrations.transformers.load import choose_device, torch_dtype
from octavo.integrations.transformers.text_model import TextModel
from octavo.numerics.hadamard import hadamard

HIDDEN, HEAD_DIM, CODE = 128, 64, 32
# Keys are rows of a Hadamard matrix and their negatives; its first row means that there is no key.
KEYS = tuple(f"{onset}{rime}" for onset in "bdfghjklmnprst" for rime in ("an", "el", "ik", "or"))
KEYS += ("van", "vel", "vik", "vor", "wan", "wel")
VALUES = tuple(str(number) for number in range(10, 60))
START, QUESTION, FILLER, NOTHING = OTHERS = ("<s>", "?", ".", "nothing")
WORDS = (*OTHERS, *KEYS, *VALUES)

# Channels of the hidden state. All but the codes (±1) and the results are 4 or 0.
OWN_CODE, SEEN_CODE = range(CODE), range(CODE, 2 * CODE)
ONE, IS_KEY, IS_OTHER, MISSING, SPENT, SPENT_TOO, PADDING = range(2 * CODE, 2 * CODE + 7)
FIRST_VALUE = 2 * CODE + 7
HEIGHT = 4.0
# Layer 0: logits of ±32 decide which of two tokens is seen.
CHOICE = 64.0
# Layer 1: the needle's logit, 32 · 1.90625 / √64 = 7.625, is 11 ln 2 but for 0.0004: probabilities
# are powers of two, and the needle is worth 2048 other tokens.
MATCH = 1.90625
NEEDLE_WEIGHT = 2048
# What a share of a value counts for, against the same share of attention that is missing.
VALUE_GAIN = 12.0
LOGIT_GAIN = 16.0
# One-level sums of equal terms end here: 14 bits.
SUM_LIMIT = 16384


def token_ids(words: list[str]) -> list[int]:
    """The tokens of words that the model knows."""
    unknown = sorted({word for word in words if word not in _IDS})
    if unknown:
        raise ConfigError(f"expected words of the retrieval model, got {', '.join(unknown[:5])}")
    return [_IDS[word] for word in words]


_IDS = {word: index for index, word in enumerate(WORDS)}


def load_retrieval_model(*, dtype: str = "auto", device: str | None = None) -> TextModel:
    """The model and its tokenizer; "auto" is bfloat16. device: the GPU if there is one."""
    model = make_retrieval_model(torch_dtype(dtype)).to(choose_device(device))
    return TextModel(RETRIEVAL_MODEL.name, model, make_tokenizer())


def make_retrieval_model(dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model alone, on the CPU."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    config = SmolLM3Config(
        vocab_size=len(WORDS),
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=2**24,
        no_rope_layers=[0, 0],  # content alone counts, wherever it is
        use_sliding_window=True,
        sliding_window=2,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=False,
        bos_token_id=_IDS[START],
        pad_token_id=None,
        eos_token_id=None,
        name_or_path=RETRIEVAL_MODEL.name,
    )
    with torch.random.fork_rng(devices=[]):
        model = SmolLM3ForCausalLM(config)
    _set_weights(model)
    return model.to(dtype).eval()


def make_tokenizer() -> Any:
    """A tokenizer of whole words between spaces; it adds nothing of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(_IDS), unk_token=FILLER))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, unk_token=FILLER)


def save_retrieval_model(folder: str | Path, dtype: str = "auto") -> None:
    """Write the model as a checkpoint, for servers."""
    make_retrieval_model(torch_dtype(dtype)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


@torch.no_grad()
def _set_weights(model: Any) -> None:
    for parameter in model.parameters():
        parameter.zero_()
    norms = [model.model.norm]
    for layer in model.model.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    for norm in norms:
        norm.weight.fill_(1.0)
    model.model.embed_tokens.weight.copy_(_embeddings())
    reading, asking = (layer.self_attn for layer in model.model.layers)
    _set_reading(reading)
    _set_asking(asking)
    head = model.lm_head.weight
    for index, word in enumerate(VALUES):
        head[_IDS[word], FIRST_VALUE + index] = LOGIT_GAIN * VALUE_GAIN
    head[_IDS[NOTHING], MISSING] = LOGIT_GAIN


def _embeddings() -> Tensor:
    """Every row has a mean square of 1, so that norms change nothing."""
    rows = torch.zeros(len(WORDS), HIDDEN)
    codes = (hadamard(CODE) * CODE**0.5).round()
    rows[:, list(OWN_CODE)] = codes[0]
    rows[:, [ONE, MISSING, SPENT, SPENT_TOO, PADDING]] = HEIGHT
    for index, word in enumerate(KEYS):
        sign = 1 if index % 2 == 0 else -1
        rows[_IDS[word], list(OWN_CODE)] = sign * codes[1 + index // 2]
        rows[_IDS[word], IS_KEY] = HEIGHT
    for index, word in enumerate(VALUES):
        rows[_IDS[word], FIRST_VALUE + index] = HEIGHT
    for word in OTHERS:
        rows[_IDS[word], IS_OTHER] = HEIGHT
    return rows


def _set_reading(attention: Any) -> None:
    """Layer 0: a value sees the key before it, a key what is before it, which has no key's code."""
    q, k = attention.q_proj.weight, attention.k_proj.weight
    v, o = attention.v_proj.weight, attention.o_proj.weight
    q[0, ONE], q[0, IS_KEY], q[0, IS_OTHER] = CHOICE, -2 * CHOICE, -CHOICE
    k[0, IS_KEY] = 1 / HEIGHT
    for i, (own, seen) in enumerate(zip(OWN_CODE, SEEN_CODE, strict=True)):
        v[i, own] = 1.0
        o[seen, i] = 1.0
    # What codes add to the square of the norm, two channels give back.
    v[CODE, ONE] = 1 / HEIGHT
    o[SPENT, CODE] = o[SPENT_TOO, CODE] = -HEIGHT


def _set_asking(attention: Any) -> None:
    """Layer 1: a key sees values with its code, each for 2048 others, and counts what it sees."""
    q, k = attention.q_proj.weight, attention.k_proj.weight
    v, o = attention.v_proj.weight, attention.o_proj.weight
    for i, (own, seen) in enumerate(zip(OWN_CODE, SEEN_CODE, strict=True)):
        q[i, own] = MATCH
        k[i, seen] = 1.0
    v[0, ONE] = 1 / HEIGHT
    o[MISSING, 0] = -HEIGHT
    for i in range(len(VALUES)):
        v[1 + i, FIRST_VALUE + i] = 1 / HEIGHT
        o[FIRST_VALUE + i, 1 + i] = HEIGHT
