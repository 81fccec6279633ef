"""The kernel lane: the same property tests run in Triton's interpreter on a CPU, or compiled on a GPU.

One process has one mode: `TRITON_INTERPRET=1` in the environment picks the interpreter (float32 and float16, which is
all it computes right), otherwise a GPU is needed. With neither, every test here is skipped and says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy
import pytest
import torch
import triton

from tritonllm.kernels.launch import interpreting
from tritonllm.testing.poison import poisoned_memory
from tritonllm.testing.tensors import exact_dtypes, kernel_device

INTERPRETING = interpreting()
RUNNABLE = INTERPRETING or torch.cuda.is_available()
if INTERPRETING:
    from tritonllm.testing.interpreter import patch_once_a_launch

    patch_once_a_launch()

_COMMON: dict[str, Any] = {
    "deadline": None,  # the first example of a shape compiles
    "derandomize": True,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
}
hypothesis.settings.register_profile("interpret", max_examples=10, **_COMMON)
hypothesis.settings.register_profile("gpu", max_examples=50, **_COMMON)
hypothesis.settings.register_profile("soak", max_examples=300, **{**_COMMON, "derandomize": False})
hypothesis.settings.load_profile("interpret" if INTERPRETING else "gpu")


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    if INTERPRETING and _version(triton.__version__) < (3, 7) and _version(numpy.__version__) >= (2, 4):
        raise pytest.UsageError(
            f"the interpreter of Triton {triton.__version__} cannot run loops with numpy {numpy.__version__}; "
            "install triton>=3.7 or numpy<2.4"
        )
    if not RUNNABLE:
        reason = "kernels need a GPU or Triton's interpreter: set TRITON_INTERPRET=1 to run them on this CPU"
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run in this process."""
    return kernel_device()


@pytest.fixture(scope="session")
def dtypes() -> tuple[torch.dtype, ...]:
    """Activation types that kernels compute right here; draw one with `st.sampled_from(dtypes)`."""
    return exact_dtypes()


@pytest.fixture(scope="module", autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """An element that a kernel leaves unwritten shows."""
    with poisoned_memory():
        yield
