"""octavo.LLM with images: the form of prompts, models by name, the shipped chart reader."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")
import octavo
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo_testkit.models import vision_families
from octavo_testkit.models.text_models import make_tokenizer
from octavo_testkit.models.vision_families import make_image, make_processor

TEMPLATE = (
    "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %}<|start|><|image|>"
    "<|stop|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
)
GREEDY = octavo.Sampling(temperature=0, max_tokens=6)
SETTINGS = octavo.EngineSettings(page_size=16, num_pages=32, max_num_seqs=4)


def chat_tokenizer():
    """Three tokens of images, which stand for those of the model; bytes for the rest."""
    tokenizer = make_tokenizer(TEMPLATE, has_bos=False)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|start|>", "<|image|>", "<|stop|>"]}
    )
    return tokenizer


@pytest.fixture(scope="module")
def model():
    tokenizer = chat_tokenizer()
    made = vision_families.make_model("qwen3_vl", vocab_size=len(tokenizer))
    made.config.image_token_id = tokenizer.convert_tokens_to_ids("<|image|>")
    return made


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3-vl")
    model.save_pretrained(path)
    chat_tokenizer().save_pretrained(path)
    make_processor().save_pretrained(path)
    return path


def test_texts_tokens_and_messages_with_images_are_the_same(model):
    tokenizer = chat_tokenizer()
    text = "<|start|><|image|><|stop|>what is it"
    image = {"images": [make_image(1)]}
    parts = [{"type": "image"}, {"type": "text", "text": "what is it"}]
    prompts = [
        {"prompt": text, **image},
        {"prompt": tokenizer.encode(text), **image},
        {"prompt": [{"role": "user", "content": parts}], **image},
        {"prompt": "what is it"},
        "what is it",
    ]
    options = {"tokenizer": tokenizer, "image_processor": make_processor()}
    with octavo.LLM(model, settings=SETTINGS, **options) as llm:
        *seen, unseen, plain = llm.generate(prompts, GREEDY)
        other = llm.generate([{"prompt": text, "images": [make_image(6)]}], GREEDY)[0]
    assert seen[0].tokens == seen[1].tokens == seen[2].tokens
    assert unseen.tokens == plain.tokens
    assert len({seen[0].tokens, plain.tokens, other.tokens}) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": [9], "image": [make_image(0)]}, "got image in it"),
        ({"images": [make_image(0)]}, "got no prompt"),
        ({"prompt": [9], "images": [make_image(0)]}, "got 0"),
        ({"prompt": "text", "images": []}, "no tokenizer"),
    ],
)
def test_other_forms_are_refused(prompt, message):
    model = vision_families.make_model("qwen3_vl")
    options = {"settings": SETTINGS, "image_processor": make_processor()}
    with octavo.LLM(model, **options) as llm, pytest.raises(ConfigError, match=message):
        llm.generate([prompt], GREEDY)


def test_messages_that_the_template_refuses():
    reader = octavo.LLM("chart-reader", settings=SETTINGS, device="cpu")
    with reader as llm, pytest.raises(ConfigError, match="a question about one image"):
        llm.generate([{"prompt": [{"role": "user", "content": "What is the title?"}]}])


def test_a_model_by_name_brings_its_image_processor(model, folder):
    prompt = {"prompt": "<|start|><|image|><|stop|>what", "images": [make_image(1)]}
    options = {"tokenizer": chat_tokenizer(), "image_processor": make_processor()}
    with octavo.LLM(model, settings=SETTINGS, **options) as llm:
        truth = llm.generate([prompt], GREEDY)
    with octavo.LLM(str(folder), settings=SETTINGS, device="cpu") as llm:
        assert llm.engine.has_images
        assert llm.generate([prompt], GREEDY)[0].tokens == truth[0].tokens


def test_a_folder_without_one_has_text_alone(folder, tmp_path):
    for file in folder.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    with octavo.LLM(str(tmp_path), settings=SETTINGS, device="cpu") as llm:
        assert not llm.engine.has_images
        with pytest.raises(UnsupportedError, match="without an image processor"):
            llm.generate([{"prompt": "x", "images": [make_image(0)]}])
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="image processor"):
        octavo.LLM(str(tmp_path), settings=SETTINGS, device="cpu")


def test_generation_goes_on_after_several_turns(model):
    """A longer chat with its first turn known: only what is new is computed."""
    options = {"tokenizer": chat_tokenizer(), "image_processor": make_processor()}
    text = "<|start|><|image|><|stop|>what is it"
    with octavo.LLM(model, settings=SETTINGS, **options) as llm:
        first = llm.generate([{"prompt": text, "images": [make_image(1)]}], GREEDY)[0]
        again = llm.generate([{"prompt": text + " then", "images": [make_image(1)]}], GREEDY)[0]
    assert first.usage.cached_tokens == 0 and again.usage.cached_tokens >= 16
