"""Images in the engine's prompts: their tokens, positions and embeddings, for the Qwen-VL family.

An image is as many tokens, all of one id, as its grid has cells of merged patches. Their positions
have three parts (frame, row, column), so what follows an image is not at its index.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers.fused_vision import FAMILIES
from octavo.integrations.transformers.vision_graphs import history_kept

SERVED = [name for name, family in FAMILIES.items() if family.is_served]


@dataclass(frozen=True)
class ImageSpan:
    """The tokens of one image, from start to before stop, and the hash of what it shows."""

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt as the model takes them; on the CPU.

    tokens: the whole prompt, every image at its full length. pixels: the patches of each image.
    grids: [images, 3], frames, rows and columns. positions: [3, tokens] int64; offset: that of a
    token after the last image, less its index. num_pixels: of all images, as the model sees them.
    """

    tokens: tuple[int, ...]
    spans: tuple[ImageSpan, ...]
    pixels: tuple[Tensor, ...]
    grids: Tensor
    positions: Tensor
    offset: int
    num_pixels: int

    def positions_of(self, start: int, stop: int) -> Tensor:
        """[3, stop - start]: of these tokens of the prompt and of what was generated after it."""
        num_prompt = len(self.tokens)
        later = torch.arange(max(start, num_prompt), max(stop, num_prompt)) + self.offset
        return torch.cat([self.positions[:, start:stop], later.expand(3, -1)], dim=1)


@dataclass(frozen=True)
class ImageFeatures:
    """What the tower makes of one image: [tokens, hidden], and what some layers add to it."""

    embeddings: Tensor
    deepstack: tuple[Tensor, ...]

    def rows(self, start: int, stop: int) -> "ImageFeatures":
        """Those of some of its tokens."""
        deepstack = tuple(layer[start:stop] for layer in self.deepstack)
        return ImageFeatures(self.embeddings[start:stop], deepstack)


@dataclass(frozen=True)
class ImagePass:
    """What a packed pass has of images.

    positions: [3, tokens]. places: the indices of image tokens, ascending; features: theirs.
    """

    positions: Tensor
    places: Tensor
    features: ImageFeatures | None


class EngineImages:
    """How one model takes images.

    processor: of images=[…], return_tensors="pt" it makes pixel_values and image_grid_thw.
    Its get_number_of_image_patches, if any, tells an image's tokens from its size alone.
    """

    def __init__(self, model: Any, processor: Any) -> None:
        if not has_vision(model):
            raise UnsupportedError(
                f"expected a model that the engine reads images for ({', '.join(SERVED)}), got "
                f"{type(model).__name__}"
            )
        self._model, self._processor = model, processor
        self.image_token = int(model.config.image_token_id)
        vision = model.config.vision_config
        self._merge = int(vision.spatial_merge_size)
        self._patch_size = 3 * int(vision.temporal_patch_size) * int(vision.patch_size) ** 2
        self._token_side = self._merge * int(vision.patch_size)  # in pixels
        self._tower_dtype = next(_tower(model).parameters()).dtype

    def count_tokens(self, width: int, height: int) -> int | None:
        """The tokens of an image of this size; None if the processor does not tell."""
        count = getattr(self._processor, "get_number_of_image_patches", None)
        if count is None or not getattr(self._processor, "do_resize", True):
            return None
        try:
            return int(count(height, width)) // self._merge**2
        except ValueError as error:
            raise _not_taken(error) from None

    def choose_reduction(self, width: int, height: int, factors: Iterable[int]) -> int:
        """The largest of these factors to reduce an image by while it is decoded; 1 if none do.

        What is left has as many tokens, and about twice the resolution that the processor will make
        of it: the processor's own resampling decides what the model sees.
        """
        num_tokens = self.count_tokens(width, height)
        if num_tokens is None:
            return 1
        side = self._token_side
        shrinks = math.sqrt(width * height / (num_tokens * side**2))
        # A narrow side is not made smaller than one token, however long the other one is.
        limit = min(shrinks, min(width, height) / side) / 2
        fitting = (
            factor
            for factor in factors
            if factor <= limit
            and self.count_tokens(-(-width // factor), -(-height // factor)) == num_tokens
        )
        return max(fitting, default=1)

    def prepare(self, prompt: Sequence[int], images: Iterable[Any]) -> PromptImages:
        """The images of a prompt, each taken once the one before is cut; safe in any thread.

        The prompt has one image token for each image, or all of them, and text between two images.
        """
        patches = [self._cut(image) for image in images]
        if not patches:
            raise ConfigError("expected one image or more, got none")
        parts, rows = zip(*patches, strict=True)
        grids = torch.cat(rows)
        lengths = [size // self._merge**2 for size in grids.prod(-1).tolist()]
        tokens = self._expand(prompt, lengths)
        digests = [_digest(*image) for image in zip(parts, grids, strict=True)]
        spans = self._find_spans(tokens, lengths, digests)
        positions, offset = self._positions(tokens, grids)
        num_pixels = sum(lengths) * self._token_side**2
        return PromptImages(tokens, spans, parts, grids, positions, offset, num_pixels)

    def _cut(self, image: Any) -> tuple[Tensor, Tensor]:
        """The patches of an image, and its grid [1, 3]."""
        # What a processor raises for an image it cannot take, by its own words.
        try:
            found = self._processor(images=[image], return_tensors="pt")
            grid = torch.as_tensor(found["image_grid_thw"]).cpu()
            pixels = torch.as_tensor(found["pixel_values"]).to("cpu", self._tower_dtype)
        except (TypeError, ValueError, OSError, KeyError) as error:
            raise _not_taken(error) from None
        if len(grid) != 1 or int(grid.prod()) != len(pixels):
            raise ConfigError(
                f"expected the patches of one image, got {len(pixels)} of {len(grid)} grids"
            )
        return pixels.contiguous(), grid

    @torch.inference_mode()
    def encode(self, images: PromptImages, which: Sequence[int]) -> list[ImageFeatures]:
        """One call of the vision tower for some of the images, by index."""
        device = self._model.device
        grids = images.grids[list(which)]
        pixels = torch.cat([images.pixels[index] for index in which])
        out = self._model.get_image_features(
            pixels.to(device), image_grid_thw=grids.to(device), return_dict=True
        )
        lengths = [images.spans[index].stop - images.spans[index].start for index in which]
        # Versions of transformers differ in whether they split what layers add, too.
        layers = [_joined(layer) for layer in getattr(out, "deepstack_features", None) or ()]
        embeddings = _joined(out.pooler_output).split(lengths)
        deepstack = [layer.split(lengths) for layer in layers]
        return [
            ImageFeatures(rows, tuple(layer[index] for layer in deepstack))
            for index, rows in enumerate(embeddings)
        ]

    def try_largest(self, num_tokens: int) -> None:
        """Run the tower on a blank square of so many tokens, to see how much memory it takes."""
        side = max(1, int(num_tokens**0.5)) * self._merge
        grid = torch.tensor([[1, side, side]])
        pixels = torch.zeros(side**2, self._patch_size, dtype=self._tower_dtype)
        span = ImageSpan(0, (side // self._merge) ** 2, b"")
        blank = PromptImages((), (span,), (pixels,), grid, torch.empty(3, 0), 0, 0)
        with history_kept(_tower(self._model)):
            self.encode(blank, [0])

    def _expand(self, prompt: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
        """The prompt with all tokens of its images."""
        num_places = sum(token == self.image_token for token in prompt)
        if num_places == sum(lengths):
            return tuple(prompt)
        if num_places != len(lengths):
            raise ConfigError(
                f"expected an image token ({self.image_token}) for each of {len(lengths)} images "
                f"in the prompt, or all of their {sum(lengths)}, got {num_places}"
            )
        tokens: list[int] = []
        left = iter(lengths)
        for token in prompt:
            tokens += [token] * (next(left) if token == self.image_token else 1)
        return tuple(tokens)

    def _find_spans(
        self, tokens: Sequence[int], lengths: Sequence[int], digests: Sequence[bytes]
    ) -> tuple[ImageSpan, ...]:
        runs, index = [], 0
        for is_image, run in groupby(tokens, lambda token: token == self.image_token):
            length = sum(1 for _ in run)
            runs += [(index, index + length)] if is_image else []
            index += length
        found = [stop - start for start, stop in runs]
        if found != list(lengths):
            raise ConfigError(
                f"expected images of {list(lengths)} tokens with text between them, got "
                f"{found}: put what the model's chat template puts there"
            )
        return tuple(ImageSpan(*run, digest) for run, digest in zip(runs, digests, strict=True))

    def _positions(self, tokens: Sequence[int], grids: Tensor) -> tuple[Tensor, int]:
        ids = torch.tensor([tokens])
        kinds = (ids == self.image_token).int()
        positions, deltas = self._model.base_model.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=grids
        )
        return positions[:, 0].long(), int(deltas[0])


def check_places(prompt: Sequence[int], images: Any, image_token: int, name: str) -> None:
    """ConfigError unless a prompt is that of its images, or has neither them nor their tokens."""
    if isinstance(images, PromptImages):
        if tuple(prompt) != images.tokens:
            raise ConfigError(
                f"request {name}: expected the tokens that prepare_images gave, got others"
            )
    elif image_token in prompt:
        raise ConfigError(
            f"request {name}: expected an image for each image token ({image_token}), got none"
        )


def has_vision(model: Any) -> bool:
    """Whether the engine reads images for such a model."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind in SERVED and hasattr(model, "get_image_features")


def forward(
    model: Any, decoder: Any, ids: Tensor, rows: Tensor, images: ImagePass, **others: Any
) -> Tensor:
    """Logits [len(rows), vocab] of a pass with images; ids [tokens], others: for attention."""
    embeddings = model.get_input_embeddings()(ids)
    deepstack: dict[str, Any] = {}
    if images.features is not None:
        own = images.features.embeddings.to(embeddings.dtype)
        embeddings = embeddings.index_copy(0, images.places, own)
        if images.features.deepstack:
            is_image = torch.zeros_like(ids, dtype=torch.bool)
            is_image[images.places] = True
            deepstack["visual_pos_masks"] = is_image[None]
            deepstack["deepstack_visual_embeds"] = list(images.features.deepstack)
    out = decoder(
        inputs_embeds=embeddings[None],
        position_ids=images.positions[:, None],
        use_cache=False,
        **deepstack,
        **others,
    )
    logits: Tensor = model.get_output_embeddings()(out.last_hidden_state[0, rows])
    return logits


def _not_taken(error: Exception) -> ConfigError:
    return ConfigError(
        f"expected images that the model's processor takes, got {type(error).__name__}: {error}"
    )


def _joined(parts: Tensor | Sequence[Tensor]) -> Tensor:
    return parts if isinstance(parts, Tensor) else torch.cat(list(parts))


def _tower(model: Any) -> nn.Module:
    tower: nn.Module = model.base_model.visual
    return tower


def _digest(pixels: Tensor, grid: Tensor) -> bytes:
    """The hash of an image's patches and of how they lie."""
    found = hashlib.sha256(str(grid.tolist()).encode())
    # As bytes: numpy, whose memory can be read, has no bfloat16.
    found.update(pixels.view(torch.uint8).numpy().data)
    return found.digest()
