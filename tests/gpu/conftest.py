"""Tests on a GPU: all are skipped where torch finds none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed

from pipeline.distributed.process_group import DistContext
from tests.gpu.training import group_of_one

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder. Libraries warn of things on GPUs that no other test meets;
    such a warning is shown, and is no failure."""
    own = [item for item in items if HERE in item.path.parents]
    present = bool(own) and torch.cuda.is_available()
    for item in own:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.filterwarnings("default"))
        if not present:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DistContext]:
    """Return this process as the one rank of a process group on the GPU."""
    before = dict(os.environ)
    yield group_of_one(tmp_path_factory.mktemp("group"), "cuda")
    torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Have fp32 products computed in fp32, and not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
