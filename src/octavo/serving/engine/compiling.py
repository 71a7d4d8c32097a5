"""torch.compile for what lies around attention in a model's layers, before the first request."""

import logging
import time
from collections.abc import Callable

import torch

from octavo.cache.spec import CacheSpec
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.layers.linear import FEW_ROWS
from octavo.serving.engine.settings import EngineSettings
from octavo.serving.engine.sizing import try_pass

logger = logging.getLogger(__name__)

# Numbers of tokens for which layers get versions of their own: one; a few, whose rows an op
# quantizes while its product starts; and more.
TRIALS = (1, FEW_ROWS, 4 * FEW_ROWS)


def pays_off(device: torch.device) -> bool:
    """Whether layers are compiled where nobody has said so."""
    return device.type == "cuda"


def compile_layers(
    model: EngineModel,
    spec: CacheSpec,
    settings: EngineSettings,
    tell: Callable[[str], object] = logger.info,
) -> bool:
    """Compile a model's layers if the settings say so; returns whether they are.

    Where nobody asked for it, a model that cannot be compiled stays as it is, with a warning. tell:
    gets a line before and after.
    """
    is_wanted = settings.compile
    if is_wanted is None:
        is_wanted = pays_off(model.device) and settings.cuda_graphs is not False
    if not is_wanted:
        return False
    tell("compiling the model's layers (once; what is made stays in OCTAVO_CACHE_DIR)")
    began = time.perf_counter()
    model.compile()
    try:
        for num_tokens in TRIALS:
            if num_tokens <= settings.max_num_batched_tokens:
                try_pass(model, spec, num_tokens=num_tokens, num_seqs=1)
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if settings.compile:
            raise
        model.stop_compiling()
        logger.warning(
            "the model runs without torch.compile, which failed: %s: %s. --no-compile, or "
            "EngineSettings(compile=False), leaves it out",
            *(type(error).__name__, error),
        )
        return False
    tell(f"compiled the model's layers in {time.perf_counter() - began:.1f} s")
    return True
