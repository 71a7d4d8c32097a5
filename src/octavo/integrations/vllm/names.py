"""The names by which vLLM knows octavo, and what octavo was tested with inside it."""

# The minor versions that the plug-in is tested with, by tests/vllm_engine.
TESTED = ("0.26", "0.32")
BACKEND = "OCTAVO"
QUANTIZATION = "octavo"
# vLLM's flag for attention of vision encoders in FP8.
ENCODER_FLAG = "--mm-encoder-attn-dtype"
# vLLM shows what is logged below "vllm".
LOGGER = "vllm.plugins.octavo"
# vLLM's words for a KV cache in e4m3.
FP8 = ("fp8", "fp8_e4m3")


def warn_on_gpu() -> None:
    """Say that nobody has run the plug-in on a GPU, where it is about to run on one."""
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        init_logger(LOGGER).warning(
            "octavo's plug-in has been tested on CPUs only: compare its answers with vLLM's own "
            "before you rely on them"
        )
