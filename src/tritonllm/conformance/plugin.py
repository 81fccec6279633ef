"""The kit's options, as a plugin of pytest, which imports it wherever tritonllm is installed: it must stay cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tritonllm.hookspecs import ModelSpec

SPECS: pytest.StashKey[list[ModelSpec]] = pytest.StashKey()
"""The families to test, in `config.stash`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("tritonllm", "tritonllm: conformance of model families (--pyargs tritonllm.conformance)")
    group.addoption(
        "--tritonllm-model",
        action="append",
        default=[],
        metavar="NAME_OR_PATH",
        help="test the families of this distribution, entry point, model spec, checkpoint or folder; may be repeated",
    )
    group.addoption(
        "--tritonllm-spec",
        action="append",
        default=[],
        metavar="MODULE:SPEC",
        help="test this ModelSpec, installed as a plugin or not; may be repeated",
    )
    group.addoption(
        "--tritonllm-device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where the engine runs (default: auto)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find the families that the options name."""
    names, references = config.getoption("--tritonllm-model"), config.getoption("--tritonllm-spec")
    config.stash[SPECS] = []
    if not names and not references:
        return
    from tritonllm.conformance.families import load_spec, specs_named
    from tritonllm.errors import TritonLLMError

    try:
        # A spec that is given outright needs no registry; then a model's name only says which one is meant.
        found = [load_spec(reference) for reference in references] or [s for name in names for s in specs_named(name)]
    except TritonLLMError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[SPECS] = list(dict.fromkeys(found))
