"""Image-text models of a folder as readers of charts."""

import pytest
import torch

from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.transformers import vision_language
from octavo.integrations.transformers.vision_language import PROMPT, load_vlm_reader

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from PIL import Image

from octavo_testkit.models import vlm_folders


def test_a_folder_answers_questions_of_several_lengths(tmp_path, monkeypatch):
    folder = vlm_folders.write_llava(tmp_path / "llava")
    monkeypatch.setattr(vision_language, "MAX_ANSWER_TOKENS", 4)
    reader = load_vlm_reader(str(folder)).to("cpu")
    assert reader.name == str(folder) and reader.model.dtype == torch.bfloat16
    given = {}
    generate = reader.model.generate

    def record(**inputs):
        given.update(inputs)
        return generate(**inputs)

    monkeypatch.setattr(reader.model, "generate", record)
    images = [Image.new("RGB", (40, 30), color) for color in ("red", "blue")]
    questions = ["How many bars?", "Is the third bar, of the last year, the highest of all?"]
    together = reader.answer(images, questions)
    assert len(together) == 2 and all(isinstance(answer, str) for answer in together)
    # Padding is on the left: the shorter question's row ends as it would alone.
    lengths = given["attention_mask"].sum(1)
    assert lengths[0] < lengths[1] == given["input_ids"].shape[1]
    assert given["attention_mask"][0, -1] == 1 and given["attention_mask"][0, 0] == 0
    for row, question in zip(given["input_ids"], questions, strict=True):
        text = reader.processor.decode(row.tolist(), skip_special_tokens=True)
        assert text == f"user: {PROMPT.format(question=question)}\nassistant: "
    assert not any("assistant:" in answer for answer in together)  # of new tokens alone
    assert reader.answer(images[1:], questions[1:]) == together[1:]


def test_a_folder_without_a_processor_is_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=f"{tmp_path}: expected an image-text model with its processor, got"
    ):
        load_vlm_reader(str(tmp_path))


def test_a_processor_without_a_chat_template(tmp_path):
    from octavo.integrations.transformers.tokenizer import PromptSettings

    folder = vlm_folders.write_llava(tmp_path / "llava")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template: .*--chat-template FILE"):
        load_vlm_reader(str(folder))
    prompts = PromptSettings(chat_template=vlm_folders.TEMPLATE)
    reader = load_vlm_reader(str(folder), prompts=prompts)
    assert reader.processor.chat_template == vlm_folders.TEMPLATE
