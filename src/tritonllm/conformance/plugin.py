"""The kit's options, as a plugin of pytest, which imports it wherever tritonllm is installed: it must stay cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tritonllm.conformance.subjects import Subject

SUBJECTS: pytest.StashKey[list[Subject]] = pytest.StashKey()
"""What to test, in `config.stash`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("tritonllm", "tritonllm: conformance of model families (--pyargs tritonllm.conformance)")
    group.addoption(
        "--tritonllm-model",
        action="append",
        default=[],
        metavar="NAME_OR_PATH",
        help="test the families of this distribution, entry point, spec or checkpoint; of a folder or .gguf file also "
        "whether it has the tensors of the model; may be repeated",
    )
    group.addoption(
        "--tritonllm-spec",
        action="append",
        default=[],
        metavar="MODULE:SPEC",
        help="test this ModelSpec, installed or not; --tritonllm-model may name a checkpoint for it; may be repeated",
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
    config.stash[SUBJECTS] = []
    if not names and not references:
        return
    from tritonllm.conformance.subjects import subjects
    from tritonllm.errors import TritonLLMError

    try:
        config.stash[SUBJECTS] = subjects(names, references)
    except TritonLLMError as error:
        raise pytest.UsageError(str(error)) from error
