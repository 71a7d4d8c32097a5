"""The names by which vLLM knows octavo, and the versions of vLLM that it knows."""

# The minor versions that the plug-in is tested with, by `make test-vllm`.
TESTED = ("0.32",)
BACKEND = "OCTAVO"
QUANTIZATION = "octavo"
# vLLM shows what is logged below "vllm".
LOGGER = "vllm.plugins.octavo"
# vLLM's words for a KV cache in e4m3.
FP8 = ("fp8", "fp8_e4m3")
