"""The GPUs that advice knows."""

import pytest

from octavo.errors import ConfigError
from octavo.measure.advise.gpus import all_gpus, find_gpu


def test_every_gpu_has_sources_and_ceilings_below_its_peaks():
    for gpu in all_gpus().values():
        assert gpu.peak.source and gpu.ceilings.source
        assert 0.5 * gpu.peak.gb_per_s < gpu.ceilings.gb_per_s < gpu.peak.gb_per_s
        assert gpu.ceilings.bf16_tflops < gpu.peak.bf16_tflops
        assert (gpu.peak.fp8_tflops is not None) == gpu.has_fp8


def test_measured_ceilings_and_shares_of_data_sheets():
    h200, h100 = find_gpu("h200"), find_gpu("NVIDIA H100 80GB HBM3")
    assert h200.ceilings.gb_per_s == 4540
    assert h100.ceilings.gb_per_s == pytest.approx(3350 * 4540 / 4800)
    assert h100.ceilings.tflops("FP8") == h200.ceilings.tflops("FP8")  # the same peak


def test_names_are_those_that_torch_has():
    """By them records and --measure know a GPU."""
    names = {key: gpu.name for key, gpu in all_gpus().items()}
    assert names == {
        "h200": "NVIDIA H200",
        "h100": "NVIDIA H100 80GB HBM3",
        "b200": "NVIDIA B200",
        "l40s": "NVIDIA L40S",
        "a100": "NVIDIA A100-SXM4-80GB",
    }


def test_a_gpu_without_fp8_multiplies_in_bf16():
    a100 = find_gpu("A100")
    assert not a100.has_fp8 and a100.ceilings.tflops("FP8") == a100.ceilings.tflops("BF16")


def test_an_architecture_is_its_first_gpu():
    found = {name: find_gpu(name).key for name in ("Ada", "blackwell", "hopper", "ampere")}
    assert found == {"Ada": "l40s", "blackwell": "b200", "hopper": "h200", "ampere": "a100"}


def test_an_unknown_gpu_is_an_error_that_lists_them():
    with pytest.raises(ConfigError, match="h200, h100, b200, l40s, a100, hopper, .*; got 'v100'"):
        find_gpu("v100")
