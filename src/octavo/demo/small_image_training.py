"""Training the small image model: pictures composed on the device, the loss, a score."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.demo.small_image import PICTURE_SIZE, cut_patches
from octavo.errors import ConfigError

# Soft ones: what is drawn stands out from all of them.
COLORS = {
    "white": (248, 248, 248),
    "black": (28, 28, 32),
    "gray": (158, 158, 162),
    "pink": (255, 200, 216),
    "yellow": (255, 238, 160),
    "green": (178, 224, 178),
    "blue": (164, 202, 246),
    "purple": (206, 180, 238),
    "orange": (255, 204, 150),
}
MARGIN = 4  # pixels that a sprite may be moved in each direction
DROP_PROMPT, DROP_WORDS = 0.1, 0.25  # shares of prompts that are empty, and without size or color


def vocabulary(names: list[str], sizes: list[str]) -> list[str]:
    """All words of prompts, each once, in a fixed order."""
    words = [word for name in names for word in name.split()]
    return list(dict.fromkeys([*sizes, "on", *COLORS, *words]))


@dataclass(frozen=True)
class Pictures:
    """Sprites and everything that is said about them, on one device.

    sprites: float32 [names, sizes, 4, height, width] in [0, 1]; can_flip: bool [names].
    colors: float32 [colors, 3] in [0, 1]; prompt_ids: int64 [names, sizes + 1, colors + 1, words],
    where the last size and the last color are those of prompts that do not name one.
    Each name and size has one color that is held out: no training picture has all three.
    """

    names: list[str]
    sizes: list[str]
    sprites: Tensor
    can_flip: Tensor
    colors: Tensor
    prompt_ids: Tensor

    @staticmethod
    def make(
        sprites: Tensor,
        names: list[str],
        sizes: list[str],
        can_flip: Tensor,
        words: Any,
        device: str,
    ) -> "Pictures":
        """From uint8 sprites [names, sizes, height, width, 4] and the encoder of their words."""
        expected = (len(names), len(sizes), PICTURE_SIZE, PICTURE_SIZE, 4)
        if not names or sprites.dtype != torch.uint8 or tuple(sprites.shape) != expected:
            raise ConfigError(
                f"expected uint8 sprites {list(expected)}, got {sprites.dtype} "
                f"{list(sprites.shape)}: draw them with scripts/draw_emoji.py"
            )
        ids = [
            [[words.encode(prompt(n, s, c)) for c in [*COLORS, None]] for s in [*sizes, None]]
            for n in names
        ]
        return Pictures(
            names,
            sizes,
            (sprites.permute(0, 1, 4, 2, 3).float() / 255).to(device),
            can_flip.to(device),
            (torch.tensor(list(COLORS.values())) / 255).to(device),
            torch.tensor(ids, device=device),
        )

    def held_out_color(self, name: Tensor, size: Tensor) -> Tensor:
        """The color that a name in a size is not trained with."""
        return (7 * name + 4 * size) % len(self.colors)

    def batch(self, num_pictures: int) -> tuple[Tensor, Tensor]:
        """Random training pictures in [-1, 1], [batch, 3, height, width], and ids of prompts."""
        device = self.sprites.device

        def draw(until: int) -> Tensor:
            return torch.randint(until, (num_pictures,), device=device)

        def chance(share: float) -> Tensor:
            return torch.rand(num_pictures, device=device) < share

        name, size, color = draw(len(self.names)), draw(len(self.sizes)), draw(len(self.colors) - 1)
        color = color + (color >= self.held_out_color(name, size)).long()
        is_flipped = chance(0.5) & self.can_flip[name]
        moves = 2 * MARGIN + 1
        pictures = self.compose(
            name, size, color, is_flipped, draw(moves) - MARGIN, draw(moves) - MARGIN
        )
        # With tensors only: a CUDA graph cannot hold a number's way to the device.
        said_size = size + (len(self.sizes) - size) * chance(DROP_WORDS)
        said_color = color + (len(self.colors) - color) * chance(DROP_WORDS)
        ids = self.prompt_ids[name, said_size, said_color]
        return pictures, ids * ~chance(DROP_PROMPT).unsqueeze(-1)

    def compose(
        self,
        name: Tensor,
        size: Tensor,
        color: Tensor,
        is_flipped: Tensor,
        down: Tensor,
        right: Tensor,
    ) -> Tensor:
        """Sprites on their backgrounds, in [-1, 1]; each argument is [batch]."""
        place = torch.arange(PICTURE_SIZE, device=name.device)
        y = (place - down.unsqueeze(1)) % PICTURE_SIZE  # what would wrap around is transparent
        x = (place - right.unsqueeze(1)) % PICTURE_SIZE
        x = torch.where(is_flipped.unsqueeze(1), PICTURE_SIZE - 1 - x, x)
        picked = self.sprites[
            name[:, None, None], size[:, None, None], :, y.unsqueeze(2), x.unsqueeze(1)
        ].permute(0, 3, 1, 2)
        shade, opacity = picked[:, :3], picked[:, 3:]
        background = self.colors[color][:, :, None, None]
        return (shade * opacity + background * (1 - opacity)) * 2 - 1


def prompt(name: str, size: str | None, color: str | None) -> str:
    """What is said about a picture: "small cat on blue"."""
    return " ".join([*([size] if size else []), name, *(["on", color] if color else [])])


class SmallImageLoss(nn.Module):
    """Rectified flow: the mean squared error of the velocity at random shares of noise."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pictures: Tensor, ids: Tensor) -> Tensor:
        """pictures: [batch, 3, height, width] in [-1, 1]; ids: [batch, words]."""
        clean = cut_patches(pictures)
        noise = torch.randn_like(clean)
        # Most of the work is between the ends, a bit more where there is much noise.
        sigma = torch.sigmoid(0.3 + 1.2 * torch.randn(len(clean), device=clean.device))
        share = sigma[:, None, None]
        velocity = self.model.velocity((1 - share) * clean + share * noise, sigma, ids)
        return F.mse_loss(velocity, noise - clean)


@dataclass(frozen=True)
class Score:
    """How many pictures are nearest to what was asked for, and how near, on average."""

    recognized: float
    psnr_db: float


def score(pictures: Tensor, data: Pictures, name: Tensor, size: Tensor, color: Tensor) -> Score:
    """Compare pictures, uint8 [batch, height, width, 3], with all sprites of their size and color.

    A picture is recognized if, of all sprites in the mirror or not and moved by up to MARGIN, one
    of the asked name is nearest to it. psnr_db is that of the nearest one of the asked name.
    """
    device = data.sprites.device
    seen = pictures.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
    names = torch.arange(len(data.names), device=device)
    none = torch.zeros_like(names)
    moves = range(-MARGIN, MARGIN + 1)
    num_right, sum_db = 0, 0.0
    for picture, n, s, c in zip(seen, name.tolist(), size.tolist(), color.tolist(), strict=True):
        known = [
            data.compose(names, none + s, none + c, flip & data.can_flip, none, none).flatten(1)
            for flip in (none > 0, none == 0)
        ]
        moved = torch.stack([picture.roll((y, x), (1, 2)) for y in moves for x in moves]).flatten(1)
        error = torch.stack([torch.cdist(moved, k).square().amin(0) for k in known]).amin(0)
        num_right += int(error.argmin()) == n
        mean_square = (error[n] / picture.numel() / 4).clamp(min=1e-6)  # of values in [0, 1]
        sum_db += float(-10 * torch.log10(mean_square))
    return Score(num_right / len(seen), sum_db / len(seen))
