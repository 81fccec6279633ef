"""The page that lists all planted faults: `python tests/mutants/page.py` writes docs/mutants.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mutant import ROOT, Mutant, noticed_by
from table import MUTANTS

PAGE = ROOT / "docs" / "mutants.md"

_HEAD = """# Planted faults

Faults that are put into a copy of the source, one at a time, and a test that fails then, or files that hold such ones.
The page is made from the tables in `tests/mutants` by `python tests/mutants/page.py`, and a test compares the two;
[testing.md](testing.md) says how the faults are run. Paths are below `tests/`.
"""


def _rows(mutants: Iterable[Mutant]) -> Iterator[str]:
    yield "| Module | Fault | Noticed by |"
    yield "| --- | --- | --- |"
    known = noticed_by()
    for mutant in sorted(mutants, key=lambda mutant: mutant.module):
        noticing = (known[mutant.name],) if mutant.name in known else mutant.tests
        tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in noticing).replace("|", "\\|")
        yield f"| `{mutant.module.removeprefix('tritonllm.')}` | {mutant.name.removeprefix('Hopper: ')} | {tests} |"


def page() -> str:
    """The page's text."""
    interpreted = [mutant for mutant in MUTANTS if mutant.interpreted]
    on_hopper = [mutant for mutant in MUTANTS if mutant.on_hopper]
    others = [mutant for mutant in MUTANTS if not mutant.interpreted and not mutant.on_hopper]
    parts = [_HEAD, "## Kernels, in Triton's interpreter\n", *_rows(interpreted)]
    parts += ["\n## Kernels in Gluon, on a Hopper GPU\n", *_rows(on_hopper)]
    parts += ["\n## Engine\n", *_rows(others)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
