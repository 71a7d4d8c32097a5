"""Training the chart reader: batches of equal images through the model without loops."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.demo.chart_reader import IMAGE, MERGE, PATCH, SPECIAL, cut_patches
from octavo.integrations.patch import Patch
from octavo.internals import internals, require

IGNORED = -100
# With "flash" in it: towers then hand over all images in one call.
ATTENTION = "octavo_flash_equal"


def attend_equal(
    module: Any, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of images of equal size, packed [1, heads, tokens, head_dim]: one batched call."""
    num_images = len(kwargs["cu_seq_lens_q"]) - 1
    q, k, v = (
        x.squeeze(0).unflatten(1, (num_images, -1)).transpose(0, 1) for x in (query, key, value)
    )
    out = F.scaled_dot_product_attention(q, k, v, scale=kwargs["scaling"])
    return out.transpose(1, 2).flatten(0, 1).unsqueeze(0), None


@contextmanager
def equal_images(model: Any) -> Iterator[None]:
    """Let a model take shortcuts for a while that hold for batches of images of one size.

    Without them a step waits for the device, and no CUDA graph can hold it.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend_equal)
    config, inner = model.config.vision_config, model.model
    require(
        "transformers.PreTrainedConfig._attn_implementation",
        "transformers.Qwen3VLTextModel._deepstack_process",
    )
    embed = inner.visual.patch_embed
    with Patch() as patch:
        patch.set(config, "_attn_implementation", ATTENTION)
        patch.set(embed, "forward", partial(_embed_patches, embed))
        patch.set(inner.language_model, "_deepstack_process", _add_to_images)
        yield


def _embed_patches(module: Any, patches: Tensor) -> Tensor:
    """A convolution whose windows do not overlap is a product of matrices, and faster as such."""
    return F.linear(patches, module.proj.weight.flatten(1), module.proj.bias)


def _add_to_images(hidden: Tensor, _: Tensor, features: Tensor) -> Tensor:
    """Hidden states [batch, tokens, …] plus features of each image, whose tokens begin at 1."""
    features = features.view(len(hidden), -1, hidden.shape[-1]).to(hidden.dtype)
    return hidden + F.pad(features, (0, 0, 1, hidden.shape[1] - 1 - features.shape[1]))


class Guides(nn.Module):
    """What the tower is taught at the places of an image where something is written.

    At the name of a label it should know the value and the color that belong to it, and at a value
    its label: what questions ask for is then one step away. `facts` of each place are predicted
    from the image's token there, each by a layer of its own. For training only.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_facts: int) -> None:
        super().__init__()
        self.num_facts = num_facts
        self.predict = nn.Linear(hidden_size, num_facts * vocab_size)

    def forward(self, of_images: Tensor, places: Tensor) -> Tensor:
        """The mean cross entropy of all facts that are not IGNORED.

        of_images: [batch, image tokens, hidden]; places: int64 [batch, places, 1 + facts], the
        index of an image's token and the facts there.
        """
        index = places[..., :1].expand(-1, -1, of_images.shape[-1])
        logits = self.predict(of_images.gather(1, index)).unflatten(-1, (self.num_facts, -1))
        return F.cross_entropy(
            logits.flatten(0, 2).float(), places[..., 1:].flatten(), ignore_index=IGNORED
        )


class ChartReaderLoss:
    """The loss of a chart reader on whole batches of one image size, positions computed once.

    transformers' own forward pass loops over images and sequences; this one has no loop, so that
    hundreds of images make a step. A sequence has several questions about its image. Each sees the
    image and itself alone, at the positions that it would have if it were the only one: otherwise
    answers would be copied from those before, and the image left unread.
    """

    def __init__(self, model: Any, guides: Guides | None = None) -> None:
        self.model, self.guides = model, guides
        self.places: dict[tuple[int, ...], dict[str, Any]] = {}

    def __call__(
        self, images: Tensor, ids: Tensor, labels: Tensor, segments: Tensor, places: Tensor
    ) -> Tensor:
        """The mean cross entropy of the labels that are not IGNORED, and that of the guides.

        images: uint8 [batch, height, width, 3]; ids, labels: int64 [batch, tokens], the image's
        tokens from 1 on in every row; segments: int64 [batch, tokens], 0 for what all see and the
        number of its question elsewhere, which grows; places: as `Guides` takes them. Needs
        `equal_images`.
        """
        inner = self.model.model
        place = self._place(images, ids)
        seen = inner.visual(cut_patches(images), return_dict=True, **place["vision"])
        embedded = inner.language_model.embed_tokens(ids)
        of_images = seen.pooler_output.view(len(ids), -1, embedded.shape[-1]).to(embedded.dtype)
        stop = 1 + of_images.shape[1]
        embedded = torch.cat([embedded[:, :1], of_images, embedded[:, stop:]], 1)
        hidden = inner.language_model(
            inputs_embeds=embedded,
            attention_mask=visible(segments),
            position_ids=restarted(place["text"], segments),
            visual_pos_masks=place["mask"],
            deepstack_visual_embeds=seen.deepstack_features,
            use_cache=False,
        ).last_hidden_state
        logits = self.model.lm_head(hidden[:, stop - 1 : -1])  # images have no labels
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), labels[:, stop:].flatten(), ignore_index=IGNORED
        )
        return loss if self.guides is None else loss + self.guides(of_images, places)

    def _place(self, images: Tensor, ids: Tensor) -> dict[str, Any]:
        """Everything about positions, which batches of one shape share."""
        key = (*images.shape, ids.shape[1])
        if key in self.places:
            place = self.places[key]
            return {**place, "vision": dict(place["vision"])}  # the tower pops its own
        with internals("transformers"):
            from transformers.vision_utils import (
                get_vision_interpolation_indices_and_weights,
                get_vision_position_ids,
            )

        inner, num_images = self.model.model, len(images)
        grid = torch.tensor([[1, images.shape[1] // PATCH, images.shape[2] // PATCH]])
        grids = grid.expand(num_images, 3).to(images.device)
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=inner.visual.num_grid_per_side,
            mode=inner.visual.interpolation_mode,
            align_corners=inner.visual.interpolation_align_corners,
            spatial_merge_size=MERGE,
        )
        positions = get_vision_position_ids(grid, MERGE)
        length = int(grid.prod())
        vision = {
            "grid_thw": grids,
            "cu_seqlens": torch.arange(num_images + 1, dtype=torch.int32) * length,
            "max_seqlen": length,
            "position_ids": positions.repeat(num_images, 1),
            "interp_indices": indices.repeat(num_images, 1),
            "interp_weights": weights.repeat(num_images, 1),
        }
        one = ids[:1].cpu()
        kinds = (one == SPECIAL.index(IMAGE)).int()
        text, _ = inner.get_rope_index(one, mm_token_type_ids=kinds, image_grid_thw=grid)
        moved = {k: v.to(images.device) if isinstance(v, Tensor) else v for k, v in vision.items()}
        self.places[key] = {
            "vision": moved,
            "text": text.expand(3, num_images, -1).to(images.device),
            "mask": kinds.bool().expand(num_images, -1).to(images.device),
        }
        return self._place(images, ids)


def visible(segments: Tensor) -> Tensor:
    """Which tokens each may see, bool [batch, 1, tokens, tokens]: earlier ones of its own question,
    and those of segment 0."""
    same = segments[:, :, None] == segments[:, None, :]
    earlier = torch.ones(segments.shape[1], segments.shape[1], device=segments.device).tril().bool()
    return ((same | (segments[:, None, :] == 0)) & earlier).unsqueeze(1)


def restarted(positions: Tensor, segments: Tensor) -> Tensor:
    """Positions [3, batch, tokens], where every question begins as if it were the first."""
    is_first = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    index = torch.arange(segments.shape[1], device=segments.device)
    begins = torch.where(is_first, index, 0).cummax(1).values
    first = (segments == 0).sum(1, keepdim=True)  # where the first question begins
    shift = torch.where(segments == 0, 0, begins - first)
    return positions - shift
