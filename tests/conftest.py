"""Options and hypothesis profiles that every lane shares."""

from __future__ import annotations

import hypothesis
import pytest

hypothesis.settings.register_profile("tritonllm", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("tritonllm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
