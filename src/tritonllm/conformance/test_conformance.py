"""The kit as tests, one for each family and check. Run as `pytest --pyargs tritonllm.conformance`, with its options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tritonllm.conformance.plugin import SPECS
from tritonllm.errors import TritonLLMError
from tritonllm.hookspecs import ModelSpec

if TYPE_CHECKING:
    from tritonllm.conformance.candidate import Candidate


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every check for every family that the options name."""
    specs = metafunc.config.stash[SPECS]
    if not specs:
        raise pytest.Collector.CollectError(
            "no family is named: give --tritonllm-model NAME_OR_PATH or --tritonllm-spec package.module:SPEC"
        )
    from tritonllm.conformance.checks import CHECKS

    metafunc.parametrize("candidate", specs, ids=[spec.name for spec in specs], indirect=True, scope="session")
    metafunc.parametrize("check", CHECKS)


@pytest.fixture(scope="session")
def candidate(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Candidate]:
    """The family, with its twin in a folder."""
    from tritonllm.conformance.candidate import make_candidate, one_thread

    spec: ModelSpec = request.param
    with one_thread():
        try:
            made = make_candidate(spec, tmp_path_factory.mktemp("twin"), request.config.getoption("--tritonllm-device"))
        except (TritonLLMError, ValueError) as error:
            pytest.fail(f"{spec.name}: {error}", pytrace=False)
        yield made


def test_conformance(candidate: Candidate, check: str) -> None:
    """One check of one family, failing in plain words."""
    from tritonllm.conformance.checks import CHECKS

    if check != "loads" and candidate.loading_error is not None:
        pytest.skip("the family does not load, see the check `loads`")
    try:
        CHECKS[check](candidate)
        return
    except (AssertionError, TritonLLMError) as error:
        words = str(error)
    pytest.fail(f"{candidate.spec.name}, {check}: {words}", pytrace=False)
