"""Put one fault at a time into the engine and show that the tests notice each.

    python tests/mutants/run.py            all of them
    python tests/mutants/run.py prefix     those with "prefix" in their name

Prints a table and exits with 1 if a mutant survives, or if the tests fail without any.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutant import ROOT, Mutant
from table import MUTANTS

TIMEOUT = 300


def killer(mutant: Mutant | None, tests: tuple[str, ...], interpreted: bool) -> str | None:
    """The first test that fails with the mutant in place, in Triton's interpreter or not; None if all pass.

    Raises:
        RuntimeError: pytest could not run.
    """
    paths = [str(ROOT / "src"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env["TRITONLLM_MUTANT"] = mutant.name if mutant is not None else ""
    env["TRITON_INTERPRET"] = str(int(interpreted))
    run = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "mutate", *tests]
    try:
        done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:  # a kernel with a wrong address takes the interpreter with it
        return f"died of signal {-done.returncode}"
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (1, 2) or found is None:
        raise RuntimeError(f"pytest did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found[1].removeprefix("tests/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="part of the names of mutants")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if all(word in mutant.name for word in options.words)]
    start = time.perf_counter()
    for tests, interpreted in dict.fromkeys((mutant.tests, mutant.interpreted) for mutant in mutants):
        failed = killer(None, tests, interpreted)
        if failed is not None:
            sys.stdout.write(f"without any mutant this test fails: {failed}\n")
            return 1
    width = max((len(mutant.name) for mutant in mutants), default=0)
    survivors = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        killers = pool.map(lambda mutant: killer(mutant, mutant.tests, mutant.interpreted), mutants)
        for mutant, killed_by in zip(mutants, killers, strict=True):
            survivors += killed_by is None
            sys.stdout.write(f"{mutant.name:{width}}  {killed_by or 'SURVIVED'}\n")
            sys.stdout.flush()
    duration = time.perf_counter() - start
    sys.stdout.write(f"{len(mutants)} mutants, {survivors} survived; {duration:.0f} s\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
