"""A pytest plugin: `-p mutate` with TRITONLLM_MUTANT=name replaces one module's source by the mutant's."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
from mutant import Mutant
from table import MUTANTS


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a copy of the source, in a file of its own: Triton reads a kernel's text from where its code says it is."""

    def __init__(self, mutant: Mutant) -> None:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / mutant.path.name
        path.write_text(mutant.source(), encoding="utf-8")
        super().__init__(mutant.module, str(path))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.mutant.module:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(self.mutant), origin=str(self.mutant.path))


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    # One failure is enough: no time for the smallest example, and no memory of it.
    hypothesis.settings.register_profile(
        "mutants", derandomize=True, deadline=None, database=None, phases=[hypothesis.Phase.generate]
    )
    hypothesis.settings.load_profile("mutants")


_name = os.environ.get("TRITONLLM_MUTANT")
if _name:
    (_mutant,) = [mutant for mutant in MUTANTS if mutant.name == _name]
    sys.meta_path.insert(0, _Finder(_mutant))
