"""Faults of the Gluon kernels compile, so that what a GPU notices is the fault and not a compiler's error."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness import all_cases, launches_on

from tritonllm.kernels.targets import TARGETS

FOLDER = str(Path(__file__).parents[1] / "mutants")
sys.path.insert(0, FOLDER)
try:
    from hopper_table import HOPPER_MUTANTS
    from mutant import Mutant
finally:
    sys.path.remove(FOLDER)

CASES = {
    "prefill_hopper_kernel": ("attention-hopper-head-dim-128", "attention-hopper-head-dim-64"),
    "hopper_linear_kernel": ("hopper_linear-smollm2-135m-128-bias",),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", HOPPER_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_compiles(mutant: Mutant, tmp_path: Path) -> None:
    path = tmp_path / mutant.path.name
    path.write_text(mutant.source(), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"mutated_{mutant.path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    target = TARGETS["sm_90"]
    for case in CASES[mutant.path.stem]:
        for launch in launches_on(all_cases()[case], target):
            kernel = getattr(module, launch.kernel.fn.__name__)
            assert replace(launch, kernel=kernel).aot(target.gpu).metadata.shared <= target.shared_limit
