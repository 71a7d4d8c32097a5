"""FP8 checkpoints of transformers and diffusers, by one function."""

import os
from typing import Any

from octavo.extras import need


def load_fp8(kind: Any, name: str | os.PathLike[str], **options: Any) -> Any:
    """The model of an FP8 checkpoint with its weights and scales as they are, running in FP8.

    kind: a model's class of transformers or diffusers, or an auto class such as
    AutoModelForCausalLM. name: a folder, or a hub name of transformers, in the format of
    compressed-tensors, DeepSeek, Qwen, vLLM, ModelOpt or octavo; of diffusers also a folder whose
    FP8 weights merely have scales beside them, or one safetensors file such as ComfyUI's, with the
    folder of the model's config as `config`. options: those of from_pretrained or
    from_single_file; dtype is the checkpoint's unless given, of diffusers float32. Scales of a KV
    cache wait for `apply_`. Raises CheckpointError for all that is not understood or not there.
    """
    need("octavo.load_fp8", "transformers")
    if kind.__module__.partition(".")[0] == "diffusers":
        from octavo.integrations.diffusers.load import load_fp8_model

        return load_fp8_model(kind, os.fspath(name), **options)
    from octavo.integrations.transformers import load

    return load.load_fp8(kind, name, **options)
