"""The kit as tests, one for each family and check. Run as `pytest --pyargs tritonllm.conformance`, with its options."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tritonllm.conformance.plugin import SUBJECTS
from tritonllm.errors import TritonLLMError

if TYPE_CHECKING:
    from tritonllm.conformance.candidate import Candidate
    from tritonllm.conformance.subjects import Subject
    from tritonllm.hookspecs import ModelSpec


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every check for every family that the options name."""
    subjects = metafunc.config.stash[SUBJECTS]
    if not subjects:
        raise pytest.Collector.CollectError(
            "no family is named: give --tritonllm-model NAME_OR_PATH or --tritonllm-spec package.module:SPEC"
        )
    from tritonllm.conformance.checks import CHECKS

    cases = {
        f"{subject.spec.name}-{check}": (subject, check)
        for subject in subjects
        for check in CHECKS
        if check != "checkpoint" or subject.checkpoint is not None
    }
    metafunc.parametrize(
        ("candidate", "check"), cases.values(), ids=cases.keys(), indirect=["candidate"], scope="session"
    )


@pytest.fixture(scope="session")
def candidate(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Candidate | _NoCandidate]:
    """The family, with its twin in a folder, or why there is no twin."""
    from tritonllm.conformance.candidate import make_candidate, one_thread

    subject: Subject = request.param
    spec, device = subject.spec, request.config.getoption("--tritonllm-device")
    made: Candidate | _NoCandidate
    with one_thread():
        try:
            made = make_candidate(spec, tmp_path_factory.mktemp("twin"), device, subject.checkpoint)
        except Exception as error:
            made = _NoCandidate(spec, _words(error, (TritonLLMError, ValueError)))
        yield made


class _NoCandidate(NamedTuple):
    spec: ModelSpec
    words: str


def _words(error: Exception, plain: tuple[type[Exception], ...] = (AssertionError, TritonLLMError)) -> str:
    """What is wrong; for an error in the code of the family also where, as Python says it."""
    if isinstance(error, plain) and str(error):
        return str(error)
    return f"it raises {type(error).__name__}: {error}\n\n{''.join(traceback.format_exception(error))}"


def test_conformance(candidate: Candidate | _NoCandidate, check: str) -> None:
    """One check of one family, failing in plain words."""
    from tritonllm.conformance.checks import CHECKS

    if isinstance(candidate, _NoCandidate):
        if check != "loads":
            pytest.skip("there is nothing to compare with, see the check `loads`")
        pytest.fail(f"{candidate.spec.name}, {check}: {candidate.words}", pytrace=False)
    if check not in ("loads", "checkpoint") and candidate.loading_error is not None:
        pytest.skip("the family does not load, see the check `loads`")
    try:
        CHECKS[check](candidate)
        return
    except Exception as error:
        words = _words(error)
    # Some words begin with the name of the check, for `tritonllm.conformance.check`.
    pytest.fail(f"{candidate.spec.name}, {check}: {words.removeprefix(f'{check}: ')}", pytrace=False)
