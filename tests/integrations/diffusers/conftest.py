"""Tiny pipelines, written once for all tests; and no test may leave diffusers' backend changed."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """The folder of a family's pipeline, in float32."""
    pytest.importorskip("diffusers")
    from octavo_testkit.models.tiny_pipelines import write_pipeline

    folders = {}

    def find(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            write_pipeline(family, folders[family])
        return folders[family]

    return find


@pytest.fixture(autouse=True)
def same_active_backend():
    """The backend of models that have none of their own is never ours to change."""
    pytest.importorskip("diffusers")
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    before = registry._active_backend
    yield
    after, registry._active_backend = registry._active_backend, before
    assert after is before


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield
