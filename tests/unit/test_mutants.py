"""Some of the mutants in every run; `make mutants` is all of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parents[1] / "mutants")
sys.path.insert(0, FOLDER)
try:
    from forks import Forks
    from mutant import ROOT, Mutant, noticed_by
    from page import PAGE, page
    from run import PYTHON_PATH, first_killer, killer
    from table import MUTANTS
finally:
    sys.path.remove(FOLDER)

SAMPLE = (
    "the key of a prefix ignores the last token",
    "a new block starts with ref count 0",
    "rows that fall out of the batch are not cleared",
    "a norm has no epsilon",
)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks(ROOT, PYTHON_PATH)
    yield forks
    forks.close()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_table_fits_the_source(mutant: Mutant) -> None:
    compile(mutant.source(), mutant.module, "exec")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8")
    assert [other.name for other in MUTANTS].count(mutant.name) == 1


def test_every_kernel_has_a_fault() -> None:
    """Each file with a kernel; those without one hold what several kernels share."""
    files = (ROOT / "src" / "tritonllm" / "kernels").glob("*.py")
    jitted = re.compile(r"^@(?:triton|gluon)\.jit.*?^def _\w+_kernel\(", re.MULTILINE | re.DOTALL)
    modules = {f"tritonllm.kernels.{file.stem}" for file in files if jitted.search(file.read_text(encoding="utf-8"))}
    assert len(modules) > 15
    assert modules - {mutant.module for mutant in MUTANTS} == set()


def test_what_is_on_record_exists() -> None:
    names = {mutant.name for mutant in MUTANTS}
    for mutant, test in noticed_by().items():
        file, *places = test.partition("[")[0].removesuffix("::runTest").split("::")  # that of a state machine
        assert mutant in names
        assert re.search(rf"\b{places[-1]}\b", (ROOT / file).read_text(encoding="utf-8")), test


@pytest.mark.parametrize("known", ["test_a_block_is_added_when_the_last_one_is_full_and_not_before", "test_is_no_more"])
def test_a_record_that_is_out_of_date_is_not_the_last_word(forks: Forks, known: str) -> None:
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == SAMPLE[0]]
    found = first_killer(forks, {mutant.name: f"tests/unit/test_block_manager.py::{known}"}, 300, mutant)
    assert found is not None
    assert found.startswith("unit/test_block_manager.py::")


def test_the_page_lists_them_all() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/mutants/page.py"


def test_where_every_test_is_skipped_nothing_is_proven(forks: Forks) -> None:
    with pytest.raises(RuntimeError, match="no test of .* ran"):
        killer(forks, None, ("tests/kernels/test_prefill_hopper.py::test_rows_may_be_far_apart",), interpreted=True)


def test_a_text_that_is_gone_from_the_source_is_an_error() -> None:
    with pytest.raises(ValueError, match="mend the table"):
        Mutant("", "tritonllm.engine.plan", "no such text", "").source()


@pytest.mark.parametrize("name", SAMPLE)
def test_faults_are_noticed(forks: Forks, name: str) -> None:
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]
    assert killer(forks, mutant, mutant.tests, mutant.interpreted) is not None


def test_without_a_fault_nothing_is_noticed(forks: Forks) -> None:
    assert killer(forks, None, ("tests/unit/test_block_manager.py",), False) is None
    assert killer(forks, None, ("tests/kernels/test_kv_store.py",), True) is None
