"""Training the small image model: what pictures and prompts it sees, its loss, its score."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo.demo.small_image import (
    PICTURE_SIZE,
    WordEncoder,
    cut_patches,
    make_small_image_model,
)
from octavo.demo.small_image_training import (
    COLORS,
    MARGIN,
    Pictures,
    SmallImageLoss,
    prompt,
    score,
    vocabulary,
)
from octavo.errors import ConfigError

NAMES, SIZES = ["left bar", "cross", "disk"], ["large", "small"]


def make_sprites():
    """Three shapes with transparent margins, in two sizes; the first has a side."""
    place = torch.arange(PICTURE_SIZE) - (PICTURE_SIZE - 1) / 2
    y, x = place[:, None], place[None, :]
    sprites = torch.zeros(3, 2, PICTURE_SIZE, PICTURE_SIZE, 4, dtype=torch.uint8)
    for size, reach in enumerate((19, 12)):
        bar = (y.abs() < reach) & (x > -reach) & (x < 0)
        cross = ((y.abs() < 4) | (x.abs() < 4)) & (y.abs() < reach) & (x.abs() < reach)
        disk = y**2 + x**2 < reach**2
        shades = ((220, 30, 30), (20, 120, 40), (30, 40, 200))
        for name, (shape, shade) in enumerate(zip((bar, cross, disk), shades, strict=True)):
            sprites[name, size][shape] = torch.tensor([*shade, 255], dtype=torch.uint8)
    return sprites


@pytest.fixture(scope="module")
def data():
    words = WordEncoder(words=vocabulary(NAMES, SIZES))
    can_flip = torch.tensor([False, True, True])
    return Pictures.make(make_sprites(), NAMES, SIZES, can_flip, words, "cpu")


def numbers(*values):
    return torch.tensor(values)


def as_bytes(pictures):
    return ((pictures + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)


def test_words_are_those_of_all_prompts_once():
    words = vocabulary(["red apple", "green apple"], SIZES)
    assert len(set(words)) == len(words) and {"apple", "on", "small", "green", *COLORS} <= {*words}
    assert prompt("red apple", "small", "blue") == "small red apple on blue"
    assert prompt("cat", None, None) == "cat"


def test_a_sprite_is_moved_mirrored_and_laid_on_its_color(data):
    zero, no, yes = numbers(0), torch.tensor([False]), torch.tensor([True])
    pink = numbers(list(COLORS).index("pink"))
    still = data.compose(zero, zero, pink, no, zero, zero)
    assert as_bytes(still)[0, 0, 0].tolist() == list(COLORS["pink"])
    assert as_bytes(still)[0, 24, 20].tolist() == [220, 30, 30]
    moved = data.compose(zero, zero, pink, no, numbers(3), numbers(-2))
    assert torch.equal(moved, still.roll((3, -2), (2, 3)))
    mirrored = data.compose(zero, zero, pink, yes, zero, numbers(2))
    assert torch.equal(mirrored, still.flip(3).roll(2, 3))


def test_half_opaque_pixels_mix_with_the_color(data):
    sprites = torch.full((1, 1, PICTURE_SIZE, PICTURE_SIZE, 4), 128, dtype=torch.uint8)
    words = WordEncoder(words=vocabulary(["fog"], ["large"]))
    fog = Pictures.make(sprites, ["fog"], ["large"], torch.tensor([True]), words, "cpu")
    zero = numbers(0)
    pixel = as_bytes(fog.compose(zero, zero, zero, zero > 0, zero, zero))[0, 5, 5]
    assert (pixel.int() - (128 + 248) // 2).abs().max() <= 1


def test_batches_say_what_they_show_and_leave_out_the_held_out_colors(data):
    torch.manual_seed(0)
    pictures, ids = data.batch(2000)
    assert pictures.shape == (2000, 3, PICTURE_SIZE, PICTURE_SIZE) and ids.shape == (2000, 8)
    assert pictures.min() >= -1 and pictures.max() <= 1
    is_empty = (ids == 0).all(1)
    assert 0.07 < is_empty.float().mean() < 0.13
    backgrounds = as_bytes(pictures)[:, 0, 0]
    num_full, flat = 0, data.prompt_ids.flatten(0, 2)
    for row, background in zip(ids[~is_empty], backgrounds[~is_empty], strict=True):
        (found,) = (flat == row).all(1).nonzero().flatten().tolist()
        name, rest = divmod(found, 3 * (len(COLORS) + 1))
        size, color = divmod(rest, len(COLORS) + 1)
        if color < len(COLORS):
            assert background.tolist() == list(list(COLORS.values())[color])
        if color < len(COLORS) and size < 2:
            num_full += 1
            assert color != int(data.held_out_color(numbers(name), numbers(size)))
    assert 0.5 < num_full / int((~is_empty).sum()) < 0.63
    bars = (flat[:, :2] == data.prompt_ids[0, 2, 9, :2]).all(1).nonzero()
    assert len(bars) == 10  # "left bar" with every color and without


def test_pictures_of_other_shapes_are_refused(data):
    words = WordEncoder(words=vocabulary(NAMES, SIZES))
    flips = torch.ones(3, dtype=torch.bool)
    for wrong in (make_sprites().float(), make_sprites()[:2], make_sprites()[:, :, :40]):
        with pytest.raises(ConfigError, match="draw_emoji.py"):
            Pictures.make(wrong, NAMES, SIZES, flips, words, "cpu")


def test_the_loss_is_zero_for_the_true_velocity_only(data):
    torch.manual_seed(0)
    pictures, ids = data.batch(8)
    clean = cut_patches(pictures)

    class Oracle:
        sign = 1

        def velocity(self, latents, sigma, ids):
            return self.sign * (latents - clean) / sigma[:, None, None]

    oracle = Oracle()
    assert SmallImageLoss(oracle)(pictures, ids) < 1e-6
    oracle.sign = -1
    assert SmallImageLoss(oracle)(pictures, ids) > 1


def test_the_score_knows_moved_pictures_and_others(data):
    name, size, color = numbers(0, 1, 2), numbers(0, 1, 0), numbers(1, 2, 3)
    down, right = numbers(MARGIN, -MARGIN, 0), numbers(1, 0, -MARGIN)
    is_flipped = torch.tensor([False, True, True])
    drawn = as_bytes(data.compose(name, size, color, is_flipped, down, right))
    good = score(drawn, data, name, size, color)
    assert good.recognized == 1 and good.psnr_db > 50
    bad = score(drawn, data, name.roll(1), size, color)
    assert bad.recognized == 0 and bad.psnr_db < 20
    part = score(drawn, data, numbers(0, 0, 2), size, color)
    assert part.recognized == pytest.approx(2 / 3)


@pytest.fixture
def one_thread():
    """Leave the other cores to servers whose tests have a clock."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow  # half a minute
def test_a_tiny_model_learns_two_pictures(data, one_thread):
    model = make_small_image_model(
        vocabulary(NAMES, SIZES),
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        axes_dims_rope=(8, 12, 12),
    )
    name, size, color = numbers(0, 2), numbers(0, 0), numbers(0, 4)
    pictures = data.compose(name, size, color, name < 0, size, size).repeat(2, 1, 1, 1)
    ids = data.prompt_ids[name, size, color].repeat(2, 1)
    parameters = [*model.transformer.parameters(), *model.words.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=4e-3, betas=(0.9, 0.98))
    torch.manual_seed(0)
    losses = []
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, (step + 1) / 10) * (1 - step / 310)
        optimizer.zero_grad()
        loss = SmallImageLoss(model)(pictures, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.25 * sum(losses[:10])
    prompts = ["large left bar on white", "large disk on yellow"]
    found = score(model.generate(prompts, 10, guidance=1.0), data, name, size, color)
    assert found.recognized == 1 and found.psnr_db > 12, found
