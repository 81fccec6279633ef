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

INTERPRETING = interpreting()
RUNNABLE = INTERPRETING or torch.cuda.is_available()

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
    return torch.device("cpu" if INTERPRETING else "cuda")


@pytest.fixture(scope="session")
def dtypes() -> tuple[torch.dtype, ...]:
    """Activation types that kernels compute right here; draw one with `st.sampled_from(dtypes)`."""
    exact = (torch.float32, torch.float16)
    return exact if INTERPRETING else (*exact, torch.bfloat16)


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "meta":
        return tensor
    return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


@pytest.fixture(scope="module", autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill every new uninitialised tensor with NaN (integers: the smallest), so an element left unwritten shows."""
    with torch.device("cpu"):  # at the first call torch notes which functions it places: the true `empty` is one
        torch.empty(0)
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **kwargs: _poisoned(empty(*args, **kwargs)))
        patch.setattr(torch, "empty_like", lambda *args, **kwargs: _poisoned(empty_like(*args, **kwargs)))
        patch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: _poisoned(new_empty(*args, **kwargs)))
        yield
