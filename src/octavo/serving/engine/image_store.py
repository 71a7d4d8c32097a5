"""Embeddings of images, from the vision tower until all tokens of their prompt are computed."""

import torch
from torch import Tensor

from octavo.errors import OctavoError
from octavo.integrations.transformers.engine_images import (
    EngineImages,
    ImageFeatures,
    ImagePass,
    PromptImages,
)
from octavo.serving.engine.scheduler import Batch, Chunk
from octavo.serving.engine.sequence import Sequence


class ImageError(OctavoError):
    """The vision tower failed for one request; nothing else of its pass was computed."""

    def __init__(self, sequence: Sequence, message: str) -> None:
        super().__init__(message)
        self.sequence = sequence


class ImageStore:
    """Runs the tower when the first token of an image comes into a pass, and keeps what it made.

    One call serves all images of a request that are not computed yet. What is kept goes with the
    pass of the last image token, or with the request. A request that is preempted later than that
    needs the tower again, unless its pages are still there.
    """

    def __init__(self, images: EngineImages) -> None:
        self._images = images
        self._kept: dict[str, dict[int, ImageFeatures]] = {}

    def make_pass(self, batch: Batch, positions: Tensor) -> ImagePass | None:
        """What a batch has of images; None if nothing. positions: of its tokens, one part each."""
        if not any(chunk.has_images for chunk in batch.chunks):
            return None
        three = positions.expand(3, -1).clone()
        places: list[int] = []
        features: list[ImageFeatures] = []
        first = 0  # the place in the pass of the chunk's first token
        for chunk in batch.chunks:
            if chunk.has_images:
                images: PromptImages = chunk.sequence.request.images
                own = images.positions_of(chunk.start, chunk.stop)
                three[:, first : first + chunk.num_tokens] = own.to(positions.device)
                kept = self._features(chunk, images)
                for index, span in enumerate(images.spans):
                    start, stop = max(span.start, chunk.start), min(span.stop, chunk.stop)
                    if start < stop:
                        places += range(first + start - chunk.start, first + stop - chunk.start)
                        features.append(kept[index].rows(start - span.start, stop - span.start))
            first += chunk.num_tokens
        joined = _join(features) if features else None
        return ImagePass(
            three, torch.tensor(places, dtype=torch.int64).to(positions.device), joined
        )

    def release(self, batch: Batch) -> None:
        """After a pass: drop what no token needs any more."""
        for chunk in batch.chunks:
            if chunk.has_images and chunk.stop >= chunk.sequence.image_stop:
                self.forget(chunk.sequence.request_id)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request, if anything."""
        self._kept.pop(request_id, None)

    def _features(self, chunk: Chunk, images: PromptImages) -> dict[int, ImageFeatures]:
        """The features of a request's images, of those in the chunk at least."""
        kept = self._kept.get(chunk.sequence.request_id, {})
        later = [i for i, s in enumerate(images.spans) if s.stop > chunk.start]
        inside = [i for i in later if images.spans[i].start < chunk.stop]
        if any(index not in kept for index in inside):
            missing = [index for index in later if index not in kept]
            try:
                made = self._images.encode(images, missing)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                message = f"its images failed in the vision tower: {type(error).__name__}: {error}"
                raise ImageError(chunk.sequence, message) from error
            kept = {**kept, **dict(zip(missing, made, strict=True))}
            self._kept[chunk.sequence.request_id] = kept
        return kept


def _join(features: list[ImageFeatures]) -> ImageFeatures:
    layers = zip(*(one.deepstack for one in features), strict=True)
    embeddings = torch.cat([one.embeddings for one in features])
    return ImageFeatures(embeddings, tuple(torch.cat(layer) for layer in layers))
