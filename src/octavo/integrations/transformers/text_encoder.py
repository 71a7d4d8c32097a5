"""Text encoders of pipelines whose FP8 weights transformers would not load with their scales."""

from pathlib import Path

import torch
import transformers
from torch import nn

from octavo.integrations.transformers.load import check_taken, config_with
from octavo.integrations.transformers.quantizer import OctavoConfig
from octavo.recipe import LinearSettings


def load_text_encoder(
    kind: str, folder: Path, settings: LinearSettings, dtype: torch.dtype
) -> nn.Module:
    """The model of a class of transformers from a folder with FP8 weights, running in FP8."""
    made = getattr(transformers, kind)
    config = config_with(made, str(folder), OctavoConfig(settings).to_dict())
    model, info = made.from_pretrained(
        folder, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=False
    )
    check_taken(info)
    loaded: nn.Module = model
    return loaded
