"""This lane needs a CUDA device, and the kernels compiled rather than interpreted."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

REASON = "needs a CUDA device and TRITON_INTERPRET unset"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tritonllm.kernels.launch import interpreting

    if torch.cuda.is_available() and not interpreting():
        return
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def _memory_comes_back() -> Iterator[None]:
    """Engines of one test must not leave less memory to the next."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
