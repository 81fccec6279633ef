"""Put one fault at a time into the engine and show that the tests notice each.

    python tests/mutants/run.py            all that need no GPU
    python tests/mutants/run.py prefix     those with "prefix" in their name
    python tests/mutants/run.py --gpu      those in kernels written in Gluon, on a Hopper GPU
    python tests/mutants/run.py --record   and write down which test noticed which, for the next run and docs/mutants.md

Prints a table and exits with 1 if a mutant survives, or if the tests fail without any. The test that is on record for a
mutant runs first and by itself; if it is content, all that could notice the mutant run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from forks import Forks
from mutant import NOTICED, ROOT, Mutant, noticed_by
from table import MUTANTS

TIMEOUT = 300
GPU_TIMEOUT = 120  # a lost barrier hangs
PYTHON_PATH = os.pathsep.join(
    filter(None, [str(ROOT / "src"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
)


def killer(
    forks: Forks, mutant: Mutant | None, tests: tuple[str, ...], interpreted: bool = False, timeout: int = TIMEOUT
) -> str | None:
    """The first test that fails with the mutant in place, in Triton's interpreter or not; None if all pass.

    Args:
        forks: where pytest runs.
        mutant: None for the source as it is.
        tests: files, or `file::test`.
        interpreted: run them in Triton's interpreter.
        timeout: seconds, after which a test counts as failed.

    Raises:
        RuntimeError: pytest could not run, or skipped every test.
    """
    arguments = ["-x", "-rfEs", "-p", "no:cacheprovider", "-p", "mutate", *tests]
    environment = {"TRITONLLM_MUTANT": mutant.name if mutant is not None else ""}
    try:
        status, printed = forks(arguments, environment, timeout, interpreted)
    except TimeoutError as error:
        return str(error)
    if status == 0:
        if re.search(r"\b\d+ passed", printed) is None:
            raise RuntimeError(f"no test of {', '.join(tests)} ran: {printed[-2000:]}")
        return None
    if status < 0:  # a kernel with a wrong address takes the interpreter with it
        return f"died of signal {-status}"
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    if status not in (1, 2) or found is None:
        raise RuntimeError(f"pytest did not run: {printed[-2000:]}")
    return found[1].removeprefix("tests/")


def first_killer(forks: Forks, known: dict[str, str], timeout: int, mutant: Mutant) -> str | None:
    """As `killer`, but the test that `known` names for the mutant is asked before the others."""
    if mutant.name in known:
        with suppress(RuntimeError):  # a test that is no longer there
            found = killer(forks, mutant, (known[mutant.name],), mutant.interpreted, timeout)
            if found is not None:
                return found
    return killer(forks, mutant, mutant.tests, mutant.interpreted, timeout)


def record(killers: dict[str, str]) -> None:
    """Write down which test noticed each of these mutants; what is on record for other ones that still exist stays."""
    known = {**noticed_by(), **{name: f"tests/{test}" for name, test in killers.items() if "::" in test}}
    known = {mutant.name: known[mutant.name] for mutant in MUTANTS if mutant.name in known}
    NOTICED.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="part of the names of mutants")
    parser.add_argument("--gpu", action="store_true", help="mutants that only a Hopper GPU can run")
    parser.add_argument("--jobs", type=int, help="run so many side by side; 2, or on a GPU one a core up to 16")
    parser.add_argument("--record", action="store_true", help="write down which test noticed which mutant")
    parser.add_argument(
        "--tests-pass", action="store_true", help="the tests have just passed as they are: only mutants"
    )
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if m.on_hopper == options.gpu and all(word in m.name for word in options.words)]
    timeout = GPU_TIMEOUT if options.gpu else TIMEOUT
    start = time.perf_counter()
    pool = ThreadPoolExecutor(options.jobs or (min(os.cpu_count() or 1, 16) if options.gpu else 2))
    forks = Forks(ROOT, PYTHON_PATH)
    try:
        plain = dict.fromkeys((m.tests, m.interpreted) for m in mutants if not options.tests_pass)
        failures = pool.map(lambda run: killer(forks, None, *run, timeout), plain)
        killers = pool.map(partial(first_killer, forks, noticed_by(), timeout), mutants)
        failed = next(filter(None, failures), None)
        if failed is not None:
            sys.stdout.write(f"without any mutant this test fails: {failed}\n")
            return 1
        found, width = {}, max((len(mutant.name) for mutant in mutants), default=0)
        for mutant, killed_by in zip(mutants, killers, strict=True):
            found[mutant.name] = killed_by
            sys.stdout.write(f"{mutant.name:{width}}  {killed_by or 'SURVIVED'}\n")
            sys.stdout.flush()
    except RuntimeError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    finally:
        pool.shutdown(cancel_futures=True)
        forks.close()
    survivors = sum(killed_by is None for killed_by in found.values())
    if options.record:
        record({name: killed_by for name, killed_by in found.items() if killed_by is not None})
    duration = time.perf_counter() - start
    sys.stdout.write(f"{len(mutants)} mutants, {survivors} survived; {duration:.0f} s\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
