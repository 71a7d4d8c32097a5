"""How many pages the cache gets."""

import torch

from octavo.cache.spec import CacheSpec
from octavo.errors import CapacityError, ConfigError
from octavo.integrations.transformers.engine_images import EngineImages
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.layers.saturation import WATCH
from octavo.serving.engine.request import Request, Sampling
from octavo.serving.engine.runner import Runner
from octavo.serving.engine.scheduler import Batch, Chunk
from octavo.serving.engine.sequence import Sequence
from octavo.serving.engine.settings import EngineSettings

# Without a GPU, where nobody said how large the cache may be.
CPU_CACHE_BYTES = 2**30
# Of an image of 4096 × 4096 pixels with patches of 16, four of them a token.
LARGE_IMAGE_TOKENS = 16384


def choose_num_pages(
    model: EngineModel,
    spec: CacheSpec,
    settings: EngineSettings,
    images: EngineImages | None = None,
) -> int:
    """The pages that were asked for, or else as many as memory has room for.

    On a GPU that is what a forward pass of the largest batch, and the vision tower with a large
    image if the model takes images, leave of memory_fraction of it; on a CPU one GiB. More than all
    running requests could ever use is never taken.
    """
    if settings.num_pages is not None:
        return settings.num_pages
    is_cuda = model.device.type == "cuda"
    num_bytes = _free_bytes(model, spec, settings, images) if is_cuda else CPU_CACHE_BYTES
    num_pages = spec.num_pages_in(num_bytes)
    context = settings.max_context or model.max_context
    if context is not None:
        num_pages = min(num_pages, settings.max_num_seqs * spec.num_pages_for(context))
    if num_pages < 1:
        raise CapacityError(
            f"expected room for one page of {spec.bytes_per_page} bytes, got none: use a smaller "
            "model, fewer max_num_batched_tokens or a larger memory_fraction"
        )
    return num_pages


def choose_context(model: EngineModel, num_tokens: int, settings: EngineSettings) -> int:
    """The most tokens of a prompt and its answer: of the model, and of a cache of so many tokens.

    A max_context that does not fit is an error; left out, it is what fits.
    """
    asked, own = settings.max_context, model.max_context
    if asked is None:
        return num_tokens if own is None else min(own, num_tokens)
    if own is not None and asked > own:
        raise ConfigError(f"expected max_context up to {own}, the model's own, got {asked}")
    if asked > num_tokens:
        raise ConfigError(
            f"expected max_context up to {num_tokens}, which is what the cache holds, got {asked}: "
            "set it lower, or give the cache more pages"
        )
    return asked


def _free_bytes(
    model: EngineModel, spec: CacheSpec, settings: EngineSettings, images: EngineImages | None
) -> int:
    """Bytes of GPU memory for pages, after a trial of the largest forward pass."""
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    # As many tokens, and logits of as many sequences, as there can be.
    num_tokens = settings.max_num_batched_tokens
    num_seqs = min(settings.max_num_seqs, num_tokens)
    try_pass(model, spec, num_tokens=num_tokens, num_seqs=num_seqs)
    if images is not None:
        context = settings.max_context or model.max_context or LARGE_IMAGE_TOKENS
        images.try_largest(min(context, LARGE_IMAGE_TOKENS))
    used = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(free - used - (1 - settings.memory_fraction) * total)


def try_pass(model: EngineModel, spec: CacheSpec, *, num_tokens: int, num_seqs: int) -> None:
    """A pass over tokens of several sequences, over pages of its own; no saturation is counted."""
    page = iter(range(num_tokens + num_seqs))
    chunks = []
    for index in range(num_seqs):
        length = num_tokens // num_seqs + (index < num_tokens % num_seqs)
        request = Request(request_id="", prompt=(0,) * length, sampling=Sampling())
        sequence = Sequence(request, index)
        sequence.pages.extend(next(page) for _ in range(spec.num_pages_for(length)))
        chunks.append(Chunk(sequence, 0, length, True))
    chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
    with WATCH.paused():
        Runner(model, spec, next(page)).run(Batch(tuple(chunks)))
    for layer in model.attention:
        layer.saturated.zero_()
