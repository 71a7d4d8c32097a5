"""The entry point `vllm.general_plugins`: tells vLLM what octavo offers, and takes over nothing.

vLLM calls `register` in every process. What is asked for decides what runs: octavo's attention by
`--attention-backend OCTAVO` (in vLLM 0.26 `CUSTOM`), its linear layers by `--quantization octavo`,
and its attention of vision encoders by `--mm-encoder-attn-dtype fp8`.
"""

import re
from collections.abc import Callable
from typing import Any

from octavo.integrations.vllm.names import BACKEND, ENCODER_FLAG, LOGGER, QUANTIZATION, TESTED

_BACKENDS = "octavo.integrations.vllm.backend"


def untested(version: str) -> str | None:
    """What to say of a version of vLLM that the plug-in is not tested with; None if it is."""
    release = re.match(r"\d+\.\d+", version)
    if release and release[0] in TESTED:
        return None
    wanted = " or ".join(f"{minor}.*" for minor in TESTED)
    return (
        f"octavo leaves vLLM {version} alone: its plug-in is tested with vLLM {wanted} only, so "
        f"--attention-backend {BACKEND} and --quantization {QUANTIZATION} do not exist here, and "
        f"{ENCODER_FLAG} fp8 is vLLM's own"
    )


def register() -> None:
    """Make known to vLLM what octavo offers, under its names; once or often."""
    from vllm.logger import init_logger
    from vllm.version import __version__

    if warning := untested(__version__):
        init_logger(LOGGER).warning(warning)
        return
    from vllm.model_executor.custom_op import maybe_get_oot_by_class
    from vllm.model_executor.layers.attention import MMEncoderAttention
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from octavo.integrations.vllm.encoder import OctavoEncoderAttention
    from octavo.integrations.vllm.linear import OctavoLinearConfig

    backend_member()
    if current_platform.is_cpu():
        # A CPU always gets CPU_ATTN, whatever --attention-backend says. The class that stands in
        # for it is vLLM's own unless OCTAVO was asked for.
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{_BACKENDS}.CpuBackend")
    register_quantization_config(QUANTIZATION)(OctavoLinearConfig)
    # The subclass stands in for vLLM's layer, and is vLLM's own unless FP8 was asked for. Another
    # plug-in may have registered one before: then FP8 is that plug-in's.
    if maybe_get_oot_by_class(MMEncoderAttention) is MMEncoderAttention:
        MMEncoderAttention.register_oot(OctavoEncoderAttention)


def backend_member() -> Any:
    """vLLM's name for octavo's backend, made if this process has none."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not hasattr(AttentionBackendEnum, "register"):
        # The names of vLLM 0.26 are a closed list; one of them is for backends from elsewhere.
        member = AttentionBackendEnum.CUSTOM
        register_backend(member, f"{_BACKENDS}.OctavoBackend")
        return member
    if BACKEND not in AttentionBackendEnum.__members__:
        register_backend(BACKEND, f"{_BACKENDS}.OctavoBackend")
        # vLLM's processes get the name with their settings, before they load any plug-in.
        AttentionBackendEnum[BACKEND].__reduce_ex__ = _reduce
    return AttentionBackendEnum[BACKEND]


def _reduce(protocol: object) -> tuple[Callable[[], Any], tuple[()]]:
    """How the name is pickled: as the function that makes it."""
    return backend_member, ()
