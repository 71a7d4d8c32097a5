"""The model with its pages: one forward pass over the chunks of a batch."""

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.errors import UnsupportedError
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.numerics.granularity import PerToken
from octavo.serving.engine.decode_graphs import DecodeGraphs
from octavo.serving.engine.image_store import ImageStore
from octavo.serving.engine.scheduler import Batch
from octavo.serving.engine.step import make_step

logger = logging.getLogger(__name__)


class Runner:
    """A model with its pages.

    All passes are in inference mode, trials as well: compiled layers have a graph for each mode.

    images: its embeddings of images, None if it takes none.
    graphs: what runs steps that only decode, if `use_graphs` was called and a graph can hold them.
    """

    graphs: DecodeGraphs | None = None

    def __init__(
        self,
        model: EngineModel,
        spec: CacheSpec,
        num_pages: int,
        images: ImageStore | None = None,
    ) -> None:
        self.model, self.images = model, images
        self._needs_graphs = False
        self.storage = PagedStorage(spec, num_pages, model.device)
        if isinstance(spec.granularity, PerToken):
            return
        for index, attention in enumerate(model.attention):
            if attention.dtype is not None:
                shape = spec.scale_shape(index, num_pages)
                scales = (attention.key_scale, attention.value_scale)
                self.storage.set_scales(index, *(scale.expand(shape) for scale in scales))

    def use_graphs(self, *, max_batch: int, max_context: int, is_required: bool) -> None:
        """Decode by CUDA graphs from now on; where none can, raise if they are required."""
        if self.model.device.type != "cuda":
            if is_required:
                raise UnsupportedError(
                    f"CUDA graphs need a CUDA GPU, got a model on {self.model.device}"
                )
            return
        self._needs_graphs = is_required
        sizes = {"max_batch": max_batch, "max_context": max_context}
        self.graphs = DecodeGraphs(self.model, self.storage, **sizes)

    @torch.inference_mode()
    def capture_graphs(self, progress: Callable[[list[int]], Iterable[int]] = iter) -> None:
        """Capture the graphs of all batch sizes, if steps run by them."""
        if self.graphs is None:
            return
        try:
            self.graphs.warm_up(progress)
        except UnsupportedError as error:
            self._give_up_graphs(error)

    def runs_ahead(self, batch: Batch) -> bool:
        """Whether a batch is one for `run_ahead`."""
        return self.graphs is not None and self.graphs.fits(batch)

    def run_ahead(self, batch: Batch, tokens: Tensor) -> Tensor:
        """As `run`, with tokens [sequences] that are on the device alone."""
        assert self.graphs is not None
        return self.graphs.run(batch, tokens)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Compute the chunks; returns logits [sampled sequences, vocab] for the next tokens.

        They are good until the next call.
        """
        if self.graphs is not None and self.graphs.fits(batch):
            try:
                return self.graphs.run(batch)
            except UnsupportedError as error:
                self._give_up_graphs(error)
        step = make_step(batch, self.storage)
        images = None if self.images is None else self.images.make_pass(batch, step.positions)
        if self.images is None or images is None:
            return self.model.forward(step.ids, step.positions, step.rows, step)
        logits = self.model.forward(step.ids, step.positions, step.rows, step, images)
        self.images.release(batch)
        return logits

    def _give_up_graphs(self, error: UnsupportedError) -> None:
        """Go on without graphs, unless they are required."""
        if self._needs_graphs:
            raise error
        logger.warning("decode steps run without CUDA graphs: %s", error)
        self.graphs = None
