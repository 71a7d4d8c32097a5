"""Vision-language models as a benchmark calls them, stage by stage, and as readers of charts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from octavo.errors import CheckpointError, UnsupportedError
from octavo.extras import need
from octavo.integrations.embedded_models import CHART_READER
from octavo.integrations.transformers.load import load_part, load_weights
from octavo.integrations.transformers.tokenizer import PromptSettings, check_template
from octavo.integrations.transformers.vision_tower import TINY

# Tokens of the tiny model: the bytes of a text, then these.
VISION_START, IMAGE, VIDEO, VISION_END = range(256, 260)
_TINY_VISION = {**TINY, "patch_size": 16, "temporal_patch_size": 2, "in_channels": 3}
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
    """The inputs of one request, and the times of its stages; 0 where one does both."""

    inputs: dict[str, Tensor]
    processor_ms: float
    update_prompt_ms: float


def open_vision_language(model: str | None, device: torch.device) -> "VisionLanguage":
    """The model in a folder or of a name on the hub; without one, the chart reader if its weights
    are there, else a tiny Qwen3-VL with random weights.
    """
    if model is None and not CHART_READER.is_installed:
        return TinyModel(device)
    if model is None or CHART_READER.matches(model):
        reader = CHART_READER.load(model).to(device)
        return _Reader(reader.name, reader.model, reader)
    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise CheckpointError(f"expected a model's folder with a config.json, got {model}")
    found = load_vlm_reader(model, needs_template=False).to(device)
    return replace(found, name=folder.resolve().name) if folder.is_dir() else found


def find_tower(model: Any) -> nn.Module:
    """The module whose call is the encoder's: a model's vision tower."""
    names = ("visual", "vision_tower", "vision_model")
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    found = next((m for name, m in modules if name.rpartition(".")[2] in names), None)
    if found is None:
        raise UnsupportedError(
            f"expected a model with a vision tower ({', '.join(names)}), got {type(model).__name__}"
        )
    return found


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

    def __init__(self, device: torch.device) -> None:
        import transformers

        config = transformers.Qwen3VLConfig(
            vision_config=dict(_TINY_VISION),
            text_config=dict(_TINY_TEXT),
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            make: Any = transformers.Qwen3VLForConditionalGeneration
            self.model = make(config).to(device).eval()
        self.processor = transformers.Qwen2VLImageProcessorPil(
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
            ids += [VISION_START, *[IMAGE] * (int(grid.prod()) // 4), VISION_END]
        input_ids = torch.tensor([ids + list(prompt.encode())])
        inputs = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "mm_token_type_ids": (input_ids == IMAGE).int(),
            **{name: found[name] for name in ("pixel_values", "image_grid_thw")},
        }
        moved = {name: x.to(self.model.device) for name, x in inputs.items()}
        return Prepared(moved, (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3)


@dataclass
class NamedModel:
    """An image-text model of a folder or the hub; name: what records call it."""

    name: str
    model: Any
    processor: Any

    def to(self, device: str | torch.device) -> Self:
        """The same, its model moved to `device`."""
        self.model.to(device)
        return self

    def prepare(self, prompt: str, images: Sequence[Any]) -> Prepared:
        """The inputs for one request."""
        start = time.perf_counter()
        message = _message([{"type": "image"} for _ in images], prompt)
        text = self.processor.apply_chat_template(message, add_generation_prompt=True)
        found = self.processor(text=[text], images=list(images), return_tensors="pt")
        inputs = {name: x.to(self.model.device) for name, x in found.items()}
        return Prepared(inputs, (time.perf_counter() - start) * 1e3, 0.0)

    def answer(self, images: Sequence[Any], questions: Sequence[str]) -> list[str]:
        """The answers to one question about each chart, by greedy decoding."""
        inputs = self.processor.apply_chat_template(
            [
                _message([{"type": "image", "image": image}], PROMPT.format(question=question))
                for image, question in zip(images, questions, strict=True)
            ],
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


def _message(images: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def load_vlm_reader(
    model: str, prompts: PromptSettings = PromptSettings(), *, needs_template: bool = True
) -> NamedModel:
    """An image-text model as a reader of charts, from a folder or the hub; on the CPU."""
    need(f"loading {model}", "transformers")
    import transformers

    processor = load_part("AutoProcessor", model, "an image-text model with its processor")
    if (template := prompts.read_template()) is not None:
        processor.chat_template = template
    if needs_template:
        check_template(processor)
    kind = transformers.AutoModelForImageTextToText
    return NamedModel(model, load_weights(model, kind, dtype="bfloat16", device="cpu"), processor)


class _Reader(NamedModel):
    """The chart reader; a request of several images is as many questions about one each."""

    def prepare(self, prompt: str, images: Sequence[Any]) -> Prepared:
        """The inputs for one request."""
        start = time.perf_counter()
        inputs = self.processor.prepare(images, [prompt] * len(images))
        return Prepared(inputs, (time.perf_counter() - start) * 1e3, 0.0)


VisionLanguage = TinyModel | NamedModel
