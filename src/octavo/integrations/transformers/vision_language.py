"""Vision-language models as a benchmark calls them, stage by stage, and as readers of charts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from octavo.errors import CheckpointError, UnsupportedError
from octavo.extras import need
from octavo.integrations.embedded_models import CHART_READER
from octavo.integrations.transformers.load import loading
from octavo.integrations.transformers.load_stored import load_weights
from octavo.integrations.transformers.tokenizer import PromptSettings, check_template

# Tokens of the tiny model: the bytes of a text, then these.
VISION_START, IMAGE, VIDEO, VISION_END = range(256, 260)
_TINY_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 144,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
_TINY_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 260,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_TINY_MAX_PIXELS = 128 * 128  # 64 patches: a CPU's reference attention is quick
# What a reader of charts is asked.
PROMPT = (
    "{question}\nLook at the chart and reason step by step. End with one line of the form\n"
    "Final Answer: <answer>\n"
    "where <answer> is a single word, phrase or number as the chart has it, without a unit, or Yes "
    "or No."
)
MAX_ANSWER_TOKENS = 512


@dataclass(frozen=True)
class Prepared:
    """The inputs of one request, and how long its two stages took.

    update_prompt_ms: putting image tokens into the prompt; 0 where the processor does that itself.
    """

    inputs: dict[str, Tensor]
    processor_ms: float
    update_prompt_ms: float


class VisionLanguage(Protocol):
    """A model, what records call it, and how a prompt with images becomes its inputs."""

    name: str
    model: Any

    def prepare(self, prompt: str, images: Sequence[Any]) -> Prepared:
        """The inputs for one request of a text and pillow images, on the model's device."""


def open_vision_language(model: str | None, device: torch.device) -> VisionLanguage:
    """The model in a folder or of a name on the hub; without one, the chart reader if its weights
    are there, else a tiny Qwen3-VL with random weights.
    """
    if model is None:
        return _Reader(None, device) if CHART_READER.is_installed else TinyModel(device)
    if CHART_READER.matches(model):
        return _Reader(model, device)
    return NamedModel(model, device)


def find_tower(model: Any) -> nn.Module:
    """The module whose call is the encoder's: a model's vision tower."""
    names = ("visual", "vision_tower", "vision_model")
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, module in modules.items():
        if name.split(".")[-1] in names:
            return module
    raise UnsupportedError(
        f"expected a model with a vision tower ({', '.join(names)}), got {type(model).__name__}"
    )


@torch.inference_mode()
def generate(model: Any, inputs: dict[str, Tensor], num_tokens: int) -> int:
    """Greedily generate `num_tokens` tokens; returns how many came, fewer only at a text's end."""
    ids = model.generate(
        **inputs,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return int(ids.shape[1] - inputs["input_ids"].shape[1])


class TinyModel:
    """A Qwen3-VL with random weights; its text is bytes, so it needs no tokenizer."""

    name = "tiny Qwen3-VL, random weights"

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        from transformers import (
            Qwen2VLImageProcessorPil,
            Qwen3VLConfig,
            Qwen3VLForConditionalGeneration,
        )

        config = Qwen3VLConfig(
            vision_config=dict(_TINY_VISION),
            text_config=dict(_TINY_TEXT),
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            make: Any = Qwen3VLForConditionalGeneration
            self.model = make(config).to(device).eval()
        self.processor = Qwen2VLImageProcessorPil(
            patch_size=_TINY_VISION["patch_size"],
            merge_size=_TINY_VISION["spatial_merge_size"],
            temporal_patch_size=_TINY_VISION["temporal_patch_size"],
            size={"shortest_edge": 32 * 32, "longest_edge": _TINY_MAX_PIXELS},
        )

    def prepare(self, prompt: str, images: Sequence[Any]) -> Prepared:
        """The inputs for one request."""
        start = time.perf_counter()
        found = self.processor(images=list(images), return_tensors="pt")
        middle = time.perf_counter()
        ids: list[int] = []
        for grid in found["image_grid_thw"]:
            num_tokens = int(grid.prod()) // 4
            ids += [VISION_START, *[IMAGE] * num_tokens, VISION_END]
        ids += prompt.encode()
        input_ids = torch.tensor([ids])
        inputs = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "mm_token_type_ids": (input_ids == IMAGE).int(),
            "pixel_values": found["pixel_values"],
            "image_grid_thw": found["image_grid_thw"],
        }
        moved = {name: x.to(self.model.device) for name, x in inputs.items()}
        return Prepared(moved, (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3)


class NamedModel:
    """A model and its processor, of a folder or of a name on the hub."""

    def __init__(self, model: str, device: torch.device) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        folder = Path(model)
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise CheckpointError(f"expected a model's folder with a config.json, got {model}")
        self.name = folder.resolve().name if folder.is_dir() else model
        processors: Any = AutoProcessor
        with loading(model, "an image-text model with its processor"):
            self.processor = processors.from_pretrained(model, trust_remote_code=False)
        kind: Any = AutoModelForImageTextToText
        self.model: Any = load_weights(model, kind, dtype="bfloat16", device=str(device))

    def prepare(self, prompt: str, images: Sequence[Any]) -> Prepared:
        """The inputs for one request."""
        start = time.perf_counter()
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        found = self.processor(text=[text], images=list(images), return_tensors="pt")
        inputs = {name: x.to(self.model.device) for name, x in found.items()}
        return Prepared(inputs, (time.perf_counter() - start) * 1e3, 0.0)


class _Reader:
    """The chart reader; a request of several images is as many questions about one each."""

    def __init__(self, name: str | None, device: torch.device) -> None:
        self.reader = CHART_READER.load(name).to(device)
        self.name, self.model = self.reader.name, self.reader.model

    def prepare(self, prompt: str, images: Sequence[Any]) -> Prepared:
        """The inputs for one request."""
        start = time.perf_counter()
        inputs = self.reader.prepare(images, [prompt] * len(images))
        return Prepared(inputs, (time.perf_counter() - start) * 1e3, 0.0)


@dataclass
class VlmReader:
    """A model, its processor and the name that records call it."""

    model: Any
    processor: Any
    name: str

    def to(self, device: str | torch.device) -> Self:
        """The reader, its model moved to `device`."""
        self.model.to(device)
        return self

    def answer(self, images: Sequence[Any], questions: Sequence[str]) -> list[str]:
        """The answers to one question about each image, by greedy decoding."""
        inputs = self.processor.apply_chat_template(
            [_message(image, text) for image, text in zip(images, questions, strict=True)],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
            padding_side="left",
        ).to(self.model.device, self.model.dtype)
        with torch.inference_mode():
            ids = self.model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        new = ids[:, inputs["input_ids"].shape[1] :]
        answers: list[str] = self.processor.batch_decode(new, skip_special_tokens=True)
        return answers


def _message(image: Any, question: str) -> list[dict[str, Any]]:
    text = {"type": "text", "text": PROMPT.format(question=question)}
    return [{"role": "user", "content": [{"type": "image", "image": image}, text]}]


def _prepared(processor: Any, prompts: PromptSettings) -> Any:
    """The processor with the chat template that was given; ConfigError if it has none."""
    if (template := prompts.read_template()) is not None:
        processor.chat_template = template
    check_template(processor)
    return processor


def load_vlm_reader(
    model: str,
    dtype: torch.dtype = torch.bfloat16,
    prompts: PromptSettings = PromptSettings(),
) -> VlmReader:
    """The model and processor in a folder, or of a name that transformers can load; on the CPU."""
    need(f"loading {model}", "transformers")
    import transformers

    auto: Any = transformers  # its annotations say less than it does
    with loading(model, "an image-text model with its processor"):
        processor = auto.AutoProcessor.from_pretrained(model, trust_remote_code=False)
    processor = _prepared(processor, prompts)
    kind, name = auto.AutoModelForImageTextToText, str(dtype).removeprefix("torch.")
    return VlmReader(load_weights(model, kind, dtype=name, device="cpu"), processor, name=model)
