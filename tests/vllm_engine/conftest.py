"""Tests that run vLLM in an environment of its own, which `make test-vllm` makes."""

import pytest


def pytest_ignore_collect(collection_path, config):
    # `make test-vllm` is `pytest -m vllm`; vLLM is in no other environment.
    return True if config.getoption("markexpr") != "vllm" else None


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with the tiny models, by name."""
    from octavo_testkit.vllm_engine import tiny_models

    folder = tmp_path_factory.mktemp("models")
    tiny_models.save_llama(folder / "llama")
    tiny_models.save_gemma2(folder / "gemma2")
    tiny_models.save_mixtral(folder / "mixtral")
    tiny_models.save_qwen2_vl(folder / "qwen2_vl")
    tiny_models.save_qwen3_vl(folder / "qwen3_vl")
    return folder
