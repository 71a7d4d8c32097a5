"""The chart reader: patches as transformers cuts them, answers, files, and its training loss."""

import numpy as np
import pytest
import torch

from octavo.errors import CheckpointError, ConfigError

pytest.importorskip("transformers")
pytest.importorskip("PIL")
from PIL import Image

from octavo.demo import chart_reader
from octavo.demo.chart_reader import (
    IMAGE,
    MERGE,
    SPECIAL,
    ChartProcessor,
    fit_image,
    load_chart_reader,
    make_chart_reader,
    make_tokenizer,
    save_chart_reader,
)
from octavo.demo.chart_reader_training import (
    IGNORED,
    ChartReaderLoss,
    Guides,
    equal_images,
)
from octavo.integrations.embedded_models import CHART_READER

WORDS = ["How", "many", "bars", "are", "there", "?", ",", "Apple", "Pear", *"0123456789"]


@pytest.fixture(scope="module")
def reader():
    return make_chart_reader(WORDS, seed=1)


def picture(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("size", [(32, 32), (96, 64), (288, 192)])
def test_patches_are_those_of_the_image_processor(size, reader):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024},
    )
    theirs = processor(images=[picture(*size)], return_tensors="pt")
    own = ChartProcessor(reader)([picture(*size)])
    assert theirs["image_grid_thw"].tolist() == own["image_grid_thw"].tolist()
    torch.testing.assert_close(own["pixel_values"], theirs["pixel_values"], rtol=0, atol=1e-6)


def test_a_patch_is_where_the_order_says():
    image = np.zeros((64, 96, 3), np.uint8)
    image[16 + 3, 32 + 16 + 5, 2] = 255  # second token, its fourth patch
    rows = chart_reader.cut_patches(torch.from_numpy(image[None]))
    row = 4 * 1 + 3
    place = rows.reshape(24, 3, 2, 16, 16)
    assert (rows > 0).nonzero()[:, 0].tolist() == [row, row]
    assert place[row, 2, :, 3, 5].tolist() == [1, 1] and rows.min() == -1


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((256, 224), (256, 224)),
        ((1, 1), (32, 32)),
        ((250, 40), (256, 32)),
        ((4096, 64), (1024, 32)),
    ],
)
def test_fit_image(size, expected):
    fitted = fit_image(Image.new("L", size))
    assert fitted.shape == (expected[1], expected[0], 3) and fitted.dtype == np.uint8


@pytest.mark.parametrize("size", [(1, 1), (250, 40), (640, 480), (3000, 700), (4096, 64)])
def test_the_processor_counts_patches_without_an_image(reader, size):
    processor = ChartProcessor(reader)
    found = processor(images=[Image.new("L", size)])["pixel_values"]
    assert processor.get_number_of_image_patches(height=size[1], width=size[0]) == len(found)


def test_the_tower_has_heads_of_72_and_the_whole_is_small(reader):
    tower = reader.model.model.visual
    assert {block.attn.head_dim for block in tower.blocks} == {72}
    num_parameters = sum(p.numel() for p in reader.model.parameters())
    assert num_parameters + 4096 * 192 < 10_000_000 and 2 * num_parameters <= 10_000_000


def test_texts_and_tokens(reader):
    ids = reader.encode("How many bars, 12?")
    assert [reader.tokenizer.id_to_token(i) for i in ids] == [
        "How",
        "many",
        "bars",
        ",",
        "1",
        "2",
        "?",
    ]
    assert reader.decode(ids) == "How many bars, 12?"
    assert reader.decode([*ids[:1], SPECIAL.index("<end>"), *ids]) == "How"
    assert reader.encode("Zebra") == [SPECIAL.index("<unknown>")]
    assert reader.decode([]) == "" and reader.encode("") == []
    for words in ([], ["one", "one"]):
        with pytest.raises(ConfigError, match="different words"):
            make_tokenizer(words)


def test_answers_do_not_depend_on_their_batch(reader):
    images = [picture(64, 32), picture(96, 96, 1), picture(32, 64, 2)]
    questions = ["How many bars?", "Apple?", "How many Pear are there?"]
    together = reader.answer(images, questions, max_tokens=3)
    alone = [
        reader.answer([image], [question], max_tokens=3)[0]
        for image, question in zip(images, questions, strict=True)
    ]
    assert together == alone and all(isinstance(answer, str) for answer in together)


def test_what_is_seen_matters(reader):
    inputs = [reader.prepare([picture(64, 64, seed)], ["How many?"]) for seed in (0, 1)]
    with torch.inference_mode():
        first, second = (reader.model(**one).logits for one in inputs)
    assert first.shape == (1, 4 + 2 + 3, len(WORDS) + len(SPECIAL))
    assert (first - second).abs().max() > 1e-3


def test_images_without_questions_are_refused(reader):
    for images, questions in (([], []), ([picture(32, 32)], [])):
        with pytest.raises(ConfigError, match="one question for each image"):
            reader.prepare(images, questions)


def test_a_seed_gives_one_model_and_leaves_the_callers_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (make_chart_reader(WORDS, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [r.model.model.visual.blocks[0].attn.qkv.weight for r in (first, second, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_files_round_trip(reader, tmp_path):
    size = save_chart_reader(reader, tmp_path)
    assert size < 10_000_000
    loaded = load_chart_reader(tmp_path)
    assert loaded.model.dtype == torch.bfloat16 and not loaded.model.training
    assert loaded.model.lm_head.weight is loaded.model.model.language_model.embed_tokens.weight
    theirs = reader.model.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, theirs[name].bfloat16()), name
    question = ([picture(64, 64)], ["How many bars?"])
    exact = load_chart_reader(tmp_path, torch.float32)
    assert exact.answer(*question) == loaded_answer(reader, question)


def loaded_answer(reader, question):
    """The answer of a reader whose weights were rounded to bfloat16."""
    rounded = make_chart_reader(WORDS, seed=1)
    rounded.model.bfloat16().float()
    return rounded.answer(*question)


def test_missing_and_damaged_files(reader, tmp_path):
    with pytest.raises(CheckpointError, match=r"chart_reader\.json.*scripts/train_chart_reader"):
        load_chart_reader(tmp_path / "nothing")
    save_chart_reader(reader, tmp_path)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_chart_reader(tmp_path)
    weights.write_bytes(content)
    mark = tmp_path / "chart_reader.json"
    wrong = {"{}": "format_version 1, got None", "[": "JSON", '{"format_version": 2}': "1, got 2"}
    for text, expected in wrong.items():
        mark.write_text(text)
        with pytest.raises(CheckpointError, match=f"expected .*{expected}"):
            load_chart_reader(tmp_path)


def test_weights_of_another_model_are_refused(reader, tmp_path):
    from safetensors.torch import save_file

    save_chart_reader(reader, tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="missing or unexpected"):
        load_chart_reader(tmp_path)


def test_the_shipped_reader_is_there_or_says_how_to_make_it():
    if CHART_READER.is_installed:
        assert load_chart_reader().name == "chart reader"
    else:
        with pytest.raises(CheckpointError, match="train_chart_reader"):
            load_chart_reader()


def conversation(reader, batch):
    """Images of 64 × 32 and tokens for them, labels on the last two of each row."""
    images = torch.from_numpy(np.stack([np.asarray(picture(64, 32, i)) for i in range(batch)]))
    prompt = reader.prompt("How many bars?", 2)
    ids = torch.tensor([[*prompt, *reader.encode(f"{i}"), 2] for i in range(batch)])
    labels = ids.clone()
    labels[:, :-2] = IGNORED
    segments = torch.ones_like(ids)
    segments[:, :4] = 0  # the image and what surrounds it
    return images, ids, labels, segments, torch.zeros(batch, 0, 1, dtype=torch.int64)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_loss_is_that_of_transformers(reader, batch):
    images, ids, labels, *rest = conversation(reader, batch)
    with equal_images(reader.model):
        loss = ChartReaderLoss(reader.model)(images, ids, labels, *rest)
    grid = torch.tensor([[1, 2, 4]]).expand(batch, 3)
    theirs = reader.model(
        input_ids=ids,
        labels=labels,
        pixel_values=chart_reader.cut_patches(images),
        image_grid_thw=grid,
        mm_token_type_ids=(ids == SPECIAL.index(IMAGE)).int(),
    )
    torch.testing.assert_close(loss, theirs.loss, rtol=1e-5, atol=1e-6)
    assert reader.model.config.vision_config._attn_implementation != "octavo_flash_equal"
    assert len(chart_reader.cut_patches(images)) == batch * 2 * MERGE**2


def test_questions_do_not_see_each_other(reader):
    """Two in one sequence have the losses that each has alone."""
    images, *_, places = conversation(reader, 1)
    prompt = reader.prompt("", 2)
    pairs = [(reader.encode("How many bars?"), 3), (reader.encode("Apple, Pear 7"), 2)]

    def loss_of(chosen):
        ids, labels, segments = list(prompt), [IGNORED] * len(prompt), [0] * len(prompt)
        for number, (text, num_said) in enumerate(chosen, start=1):
            ids += text
            labels += [IGNORED] * (len(text) - num_said) + text[-num_said:]
            segments += [number] * len(text)
        rows = (torch.tensor([row]) for row in (ids, labels, segments))
        with equal_images(reader.model), torch.no_grad():
            return float(ChartReaderLoss(reader.model)(images, *rows, places))

    alone = [loss_of([pair]) for pair in pairs]
    expected = (3 * alone[0] + 2 * alone[1]) / 5
    assert loss_of(pairs) == pytest.approx(expected, rel=1e-5)
    assert abs(alone[0] - alone[1]) > 0.01


def test_guides_learn_what_stands_at_a_place():
    torch.manual_seed(0)
    guides, of_images = Guides(8, 5, 2), torch.randn(3, 4, 8)
    places = torch.tensor([[[1, 4, IGNORED], [0, IGNORED, IGNORED]]] * 3)
    first = guides(of_images, places)
    logits = guides.predict(of_images[:, 1]).unflatten(-1, (2, 5))[:, 0]
    expected = torch.nn.functional.cross_entropy(logits, torch.full((3,), 4))
    torch.testing.assert_close(first, expected)


def test_the_loss_in_bfloat16_is_near(reader):
    with equal_images(reader.model), torch.no_grad():
        loss_of, given = ChartReaderLoss(reader.model), conversation(reader, 2)
        exact = loss_of(*given)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = loss_of(*given)
    assert rounded.dtype == torch.float32 and 0 < abs(exact - rounded) < 0.02


@pytest.mark.slow
def test_a_few_steps_learn_four_images_by_heart():
    reader = make_chart_reader(WORDS, seed=2)
    given = conversation(reader, 4)
    loss_of = ChartReaderLoss(reader.model.train())
    optimizer = torch.optim.AdamW(reader.model.parameters(), lr=2e-3)
    losses = []
    with equal_images(reader.model):
        for _ in range(25):
            loss = loss_of(*given)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[0] > 2 and losses[-1] < 0.5
    reader.model.eval()
    pictures = [Image.fromarray(image.numpy()) for image in given[0]]
    assert reader.answer(pictures, ["How many bars?"] * 4) == ["0", "1", "2", "3"]
