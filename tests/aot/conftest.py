"""The compile lane: needs no GPU, and cannot share a process with Triton's interpreter."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
import triton
from harness import compile_case

from tritonllm.kernels.compile_matrix import Compiled


def pytest_configure() -> None:
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise pytest.UsageError(
            "tests/aot compiles kernels, and under TRITON_INTERPRET there is nothing to compile: unset it"
        )


def pytest_report_header() -> str:
    return f"triton: {triton.__version__}"


def _is_compilation(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.originalname == "test_compiles"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_compilation)  # last: they wait for what compiles while the others run


@pytest.fixture(scope="session", autouse=True)
def compilations(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[list[Compiled]]]]:
    """Every selected (case, target), compiling in the background on all cores from the first test on."""
    wanted = [
        (item.callspec.params["case_key"], item.callspec.params["target_name"])
        for item in request.session.items
        if _is_compilation(item) and not item.get_closest_marker("skip")
    ]
    # Spawned, not forked: this process holds the thread pools of PyTorch and LLVM.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        yield {pair: pool.submit(compile_case, *pair) for pair in wanted}
        pool.shutdown(cancel_futures=True)
