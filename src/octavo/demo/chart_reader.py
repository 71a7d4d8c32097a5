"""The chart reader: a Qwen3-VL of five million parameters that answers questions about charts.

It is made of transformers' own classes. Its vision tower has heads of 72 like the large ones, so
that FP8 attention is tried on the same shapes; images are cut into patches as Qwen2VLImageProcessor
does it. Its weights come with octavo; scripts/train_chart_reader.py makes them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from octavo.demo.model_folder import (
    check_folder,
    load_weights,
    save_weights,
    write_mark,
    write_text,
)
from octavo.errors import ConfigError
from octavo.integrations.embedded_models import CHART_READER

FOLDER = CHART_READER.folder
CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
TIED = ("lm_head.weight",)  # to the embedding
PATCH, MERGE, FRAMES = 16, 2, 2  # FRAMES: an image is shown twice, as to all Qwen-VLs
UNIT = PATCH * MERGE  # sides of images are multiples of it
SPECIAL = ("<pad>", "<unknown>", "<end>", "<vision_start>", "<image>", "<vision_end>", "<video>")
PAD, UNKNOWN, END, START, IMAGE, STOP, VIDEO = SPECIAL
# One image and one question, the image first, as the reader has learned it.
CHAT_TEMPLATE = """\
{%- if messages | length != 1 or messages[0].role != 'user' or tools -%}
{{ raise_exception('the chart reader answers one message of a user, without tools') }}
{%- endif -%}
{%- set content = messages[0].content -%}
{%- if content is string -%}
{%- set images, text = [], content -%}
{%- else -%}
{%- set images = content | selectattr('type', 'equalto', 'image') | list -%}
{%- set texts = content | rejectattr('type', 'equalto', 'image') -%}
{%- set text = texts | map(attribute='text') | join(' ') -%}
{%- endif -%}
{%- if images | length != 1 or not text | trim -%}
{{ raise_exception('the chart reader answers a question about one image') }}
{%- endif -%}
<vision_start><image><vision_end> {{ text | trim -}}
"""
MAX_SIDE = 1024
MAX_ANSWER_TOKENS = 8
JOINED = r"(?<=\d) (?=\d)| (?=[,.?%])"  # spaces that no text has

VISION = {
    "depth": 6,
    "hidden_size": 144,
    "num_heads": 2,
    "intermediate_size": 576,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [2],
}
TEXT = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}


def cut_patches(images: Tensor) -> Tensor:
    """Images of one size, uint8 [batch, height, width, 3], as float32 rows of patches.

    Values go from [0, 255] to [-1, 1]. The four patches of one token come one after another; a
    row has the order channel, frame, y, x. Sides must be multiples of 32.
    """
    batch, height, width, _ = images.shape
    down, across = height // UNIT, width // UNIT
    pixels = images.to(torch.float32) / 127.5 - 1
    blocks = pixels.reshape(batch, down, MERGE, PATCH, across, MERGE, PATCH, 3)
    patches = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6)  # [batch, Y, X, y, x, channel, PATCH, PATCH]
    rows = patches.reshape(-1, 3, 1, PATCH, PATCH).expand(-1, -1, FRAMES, -1, -1)
    return rows.reshape(len(rows), -1)


def fit_image(image: Any) -> np.ndarray[Any, Any]:
    """A pillow image as uint8 [height, width, 3] with sides that the reader takes, near its own."""
    size = fit_size(*image.size)
    rgb = image.convert("RGB")
    if rgb.size != size:
        rgb = rgb.resize(size)
    return np.asarray(rgb)


def fit_size(width: int, height: int) -> tuple[int, int]:
    """The width and height at which the reader sees an image of this size."""
    if min(width, height) < 1:
        raise ConfigError(f"expected an image, got one of {width} × {height}")
    shrink = min(1.0, MAX_SIDE / max(width, height))
    seen_width, seen_height = (max(1, round(x * shrink / UNIT)) * UNIT for x in (width, height))
    return seen_width, seen_height


def make_tokenizer(words: Sequence[str]) -> Any:
    """A tokenizer of whole words, marks and single digits; other words are <unknown>."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    if not words or len(set(words)) != len(words):
        raise ConfigError(f"expected different words, got {len(words)} with repetitions")
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    pieces = Regex(r"[A-Za-z]+|\d|[^\sA-Za-z\d]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "removed", invert=True)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def make_config(vocab_size: int) -> Any:
    """The configuration of the model, for a tokenizer of this size."""
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(
        vision_config={**VISION, "out_hidden_size": TEXT["hidden_size"]},
        text_config={**TEXT, "vocab_size": vocab_size, "pad_token_id": SPECIAL.index(PAD)},
        image_token_id=SPECIAL.index(IMAGE),
        video_token_id=SPECIAL.index(VIDEO),
        vision_start_token_id=SPECIAL.index(START),
        vision_end_token_id=SPECIAL.index(STOP),
        tie_word_embeddings=True,
    )


@dataclass
class ChartReader:
    """The model and its tokenizer; `name` is what records call it."""

    model: Any
    tokenizer: Any
    name: str = "chart reader"

    def to(self, device: str | torch.device) -> Self:
        """The reader, its model moved to `device`."""
        self.model.to(device)
        return self

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens up to <end>; digits are joined again."""
        words = [self.tokenizer.id_to_token(int(i)) or UNKNOWN for i in ids]
        return re.sub(JOINED, "", " ".join(takewhile(END.__ne__, words)))

    def chat_tokenizer(self) -> Any:
        """The tokenizer as transformers' are, with a template for a message with one image."""
        from tokenizers import Regex, Tokenizer, decoders
        from transformers import PreTrainedTokenizerFast

        own = Tokenizer.from_str(self.tokenizer.to_str())
        # As `decode` has it: words with spaces between them, then digits and marks joined.
        joined = decoders.Replace(Regex(JOINED), "")
        spaced = decoders.WordPiece(prefix="##", cleanup=False)
        own.decoder = decoders.Sequence([spaced, decoders.Fuse(), joined])
        return PreTrainedTokenizerFast(
            tokenizer_object=own,
            pad_token=PAD,
            unk_token=UNKNOWN,
            eos_token=END,
            chat_template=CHAT_TEMPLATE,
            clean_up_tokenization_spaces=False,
        )

    def prompt(self, question: str, num_image_tokens: int) -> list[int]:
        """The tokens before an answer: the image's places, then the question."""
        start, image, stop = (SPECIAL.index(token) for token in (START, IMAGE, STOP))
        return [start, *[image] * num_image_tokens, stop, *self.encode(question)]

    @property
    def image_processor(self) -> "ChartProcessor":
        """The reader's image processor, as the engine takes it."""
        return ChartProcessor(self)

    def prepare(self, images: Sequence[Any], questions: Sequence[str]) -> dict[str, Tensor]:
        """The model's inputs for pillow images and a question about each; padded on the left."""
        if len(images) != len(questions) or not images:
            raise ConfigError(
                f"expected one question for each image, got {len(images)} images and "
                f"{len(questions)} questions"
            )
        seen = self.image_processor(images)
        prompts = [
            self.prompt(question, int(grid.prod()) // MERGE**2)
            for question, grid in zip(questions, seen["image_grid_thw"], strict=True)
        ]
        length = max(map(len, prompts))
        pad, image_token = SPECIAL.index(PAD), SPECIAL.index(IMAGE)
        ids = torch.tensor([[pad] * (length - len(own)) + own for own in prompts])
        inputs = {
            "input_ids": ids,
            "attention_mask": (ids != pad).long(),
            "mm_token_type_ids": (ids == image_token).int(),
            **seen,
        }
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    def answer(
        self,
        images: Sequence[Any],
        questions: Sequence[str],
        *,
        max_tokens: int = MAX_ANSWER_TOKENS,
    ) -> list[str]:
        """The answers to one question about each image, by greedy decoding."""
        inputs = self.prepare(images, questions)
        with torch.inference_mode():
            ids = self.model.generate(
                **inputs,
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=SPECIAL.index(END),
                pad_token_id=SPECIAL.index(PAD),
            )
        return [self.decode(row.tolist()) for row in ids[:, inputs["input_ids"].shape[1] :]]


@dataclass(frozen=True)
class ChartProcessor:
    """A reader's image processor, with what the engine uses of transformers' own."""

    reader: ChartReader

    def __call__(
        self, images: Sequence[Any], return_tensors: Literal["pt"] = "pt"
    ) -> dict[str, Tensor]:
        """What the vision tower takes for pillow images."""
        if not images or return_tensors != "pt":
            expected = "expected one image or more and tensors of 'pt'"
            raise ConfigError(f"{expected}, got {len(images)} and {return_tensors!r}")
        fitted = [torch.tensor(fit_image(image)).unsqueeze(0) for image in images]
        rows = torch.cat([cut_patches(image) for image in fitted])
        grids = [(1, x.shape[1] // PATCH, x.shape[2] // PATCH) for x in fitted]
        return {
            "pixel_values": rows.to(self.reader.model.dtype),
            "image_grid_thw": torch.tensor(grids),
        }

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        """The patches of an image of this size."""
        seen_width, seen_height = fit_size(width, height)
        return (seen_width // PATCH) * (seen_height // PATCH)


def make_chart_reader(words: Sequence[str], seed: int = 0) -> ChartReader:
    """A reader of these words with random weights, float32, on the CPU."""
    tokenizer = make_tokenizer(words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _make_model(make_config(tokenizer.get_vocab_size()))
    return ChartReader(model.eval(), tokenizer, name="chart reader, random weights")


def _make_model(config: Any) -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration(config)


def save_chart_reader(reader: ChartReader, folder: Path) -> int:
    """Write a reader's files, its weights in bfloat16; returns the size of the weights in bytes."""
    num_bytes = save_weights(reader.model, folder / WEIGHTS, TIED)
    write_text(folder / CONFIG, reader.model.config.to_json_string())
    write_text(folder / TOKENIZER, reader.tokenizer.to_str())
    write_mark(CHART_READER, folder)
    return num_bytes


def load_chart_reader(folder: Path = FOLDER, dtype: torch.dtype = torch.bfloat16) -> ChartReader:
    """The trained reader, or that of another folder, on the CPU."""
    files = (CONFIG, TOKENIZER, WEIGHTS)
    check_folder(CHART_READER, folder, files, "scripts/train_chart_reader.py")
    from tokenizers import Tokenizer
    from transformers import Qwen3VLConfig

    model = _make_model(Qwen3VLConfig.from_json_file(str(folder / CONFIG)))
    load_weights(model, folder / WEIGHTS, dtype, TIED)
    model.tie_weights()
    model.generation_config.eos_token_id = SPECIAL.index(END)
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    name = "chart reader" if folder == FOLDER else str(folder)
    return ChartReader(model.to(dtype).eval(), tokenizer, name=name)
