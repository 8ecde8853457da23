"""Variables of ranks on GPUs."""

from __future__ import annotations

import pytest

from pipeline.launch import local


def test_the_allocators_segments_grow_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in local.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert local.allocator_settings() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert local.allocator_settings() == {}
