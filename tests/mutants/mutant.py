"""What a mutant is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

NOTICED = Path(__file__).with_name("noticed.json")
"""Which test noticed which mutant, by name: what `run.py --record` wrote."""

PLAIN = (
    "tests/unit/test_block_manager.py",
    "tests/unit/test_scheduler.py",
    "tests/unit/test_scheduler_machine.py",
    "tests/unit/test_soak.py",
    "tests/unit/test_steady_batch.py",
)


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong.
        module: the module that is changed.
        old: text that its source holds exactly once.
        new: what stands there in the mutant.
        tests: files, or `file::test`, of which one test at least must fail.
        interpreted: they run in Triton's interpreter.
        on_hopper: they run on a Hopper GPU alone, since what is changed is written in Gluon.
    """

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...] = PLAIN
    interpreted: bool = False
    on_hopper: bool = False

    @property
    def path(self) -> Path:
        return ROOT / "src" / (self.module.replace(".", "/") + ".py")

    def source(self) -> str:
        """The mutated source.

        Raises:
            ValueError: the text is not there exactly once: the table is out of date.
        """
        source = self.path.read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise ValueError(f"{self.path.name} holds {self.old!r} {source.count(self.old)} times; mend the table")
        return source.replace(self.old, self.new)


def noticed_by() -> dict[str, str]:
    """`file::test` by the name of a mutant, for those that are on record."""
    return json.loads(NOTICED.read_text(encoding="utf-8")) if NOTICED.exists() else {}


def kernel_mutant(name: str, module: str, old: str, new: str, *tests: str) -> Mutant:
    """A fault of a kernel, noticed in the interpreter by files of `tests/kernels`, named without "test_"."""
    files = tuple(f"tests/kernels/test_{test}.py" for test in tests)
    return Mutant(name, f"tritonllm.kernels.{module}", old, new, files, interpreted=True)
