"""CLIP score, by a tiny CLIP of random weights."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from transformers import CLIPConfig, CLIPModel, CLIPTokenizer
from transformers.models.clip import CLIPImageProcessorPil

from octavo.errors import CheckpointError, ConfigError
from octavo.integrations.transformers.clip_score import load_clip_scorer

PART = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={**PART, "vocab_size": 80, "eos_token_id": 1, "bos_token_id": 0},
        vision_config={**PART, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    CLIPModel(config).eval().save_pretrained(folder)
    letters = [chr(code) for code in range(97, 123)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{x}</w>" for x in letters)]
    vocab = {word: index for index, word in enumerate(words)}
    CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77).save_pretrained(folder)
    size = {"height": 32, "width": 32}
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size).save_pretrained(folder)
    return folder


def test_a_score_is_the_cosine_of_picture_and_prompt(folder):
    scorer = load_clip_scorer(str(folder))
    pictures = torch.rand(2, 3, 48, 48)
    scores = scorer.score(pictures, ["dog", "cat"])
    alone = [scorer.score(pictures[i : i + 1], [p])[0] for i, p in enumerate(("dog", "cat"))]
    assert scores == pytest.approx(alone, abs=1e-4)
    assert all(0 <= score <= 100 for score in scores)
    # By hand, on a picture that needs no resizing.
    small = torch.rand(1, 3, 32, 32)
    rounded = (small * 255).round() / 255
    mean, std = (
        torch.tensor(x)[:, None, None]
        for x in (scorer.image_processor.image_mean, scorer.image_processor.image_std)
    )
    text = scorer.tokenizer(["dog"], return_tensors="pt")
    with torch.no_grad():
        out = scorer.model(pixel_values=(rounded - mean) / std, **text)
    cosine = float(out.image_embeds[0] @ out.text_embeds[0])
    assert cosine > 0.1 and scores[0] > 0 and scores[1] == 0.0
    assert scorer.score(small, ["dog"])[0] == pytest.approx(max(0.0, 100 * cosine), abs=1e-2)


def test_pictures_and_prompts_that_do_not_fit(folder):
    with pytest.raises(ConfigError, match="each of 2 pictures, got 1"):
        load_clip_scorer(str(folder)).score(torch.rand(2, 3, 32, 32), ["dog"])


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(CheckpointError, match="expected weights"):
        load_clip_scorer(str(tmp_path))
