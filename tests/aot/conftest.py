"""The compile lane: needs no GPU, and cannot share a process with Triton's interpreter."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
import triton
from harness import all_cases, compile_case

from tritonllm.kernels.compile_matrix import Compiled
from tritonllm.kernels.targets import TARGETS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-other-target",
        action="store_true",
        help="compile each case for every other one of its targets, the next case for those in between",
    )


def pytest_configure() -> None:
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise pytest.UsageError(
            "tests/aot compiles kernels, and under TRITON_INTERPRET there is nothing to compile: unset it"
        )


def pytest_report_header() -> str:
    return f"triton: {triton.__version__}"


def _is_compilation(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.originalname == "test_compiles"


def _pair(item: pytest.Item) -> tuple[str, str]:
    assert isinstance(item, pytest.Function)
    return item.callspec.params["case_key"], item.callspec.params["target_name"]


def _every_other_pair() -> set[tuple[str, str]]:
    """All cases and, for each op, all targets are among them."""
    chosen = set()
    for number, (key, case) in enumerate(all_cases().items()):
        targets = list(case.only or TARGETS)
        chosen.update((key, target) for target in targets[number % 2 :: 2] or targets)
    return chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--every-other-target"):
        chosen = _every_other_pair()
        dropped = [item for item in items if _is_compilation(item) and _pair(item) not in chosen]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]
    items.sort(key=_is_compilation)  # last: they wait for what compiles while the others run


@pytest.fixture(scope="session", autouse=True)
def compilations(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[list[Compiled]]]]:
    """Every selected (case, target), compiling in the background on all cores from the first test on."""
    wanted = [
        _pair(item) for item in request.session.items if _is_compilation(item) and not item.get_closest_marker("skip")
    ]
    # Spawned, not forked: this process holds the thread pools of PyTorch and LLVM.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        yield {pair: pool.submit(compile_case, *pair) for pair in wanted}
        pool.shutdown(cancel_futures=True)
