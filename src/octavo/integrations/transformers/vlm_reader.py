"""Any image-text model of transformers, with its own processor, as a reader of charts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from octavo.extras import need
from octavo.integrations.transformers.load import load_weights, loading
from octavo.integrations.transformers.tokenizer import PromptSettings, check_template

PROMPT = (
    "{question}\nLook at the chart and reason step by step. End with one line of the form\n"
    "Final Answer: <answer>\n"
    "where <answer> is a single word, phrase or number as the chart has it, without a unit, or Yes "
    "or No."
)
MAX_ANSWER_TOKENS = 512


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
