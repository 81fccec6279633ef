"""The instructions by which ranks hand data to each other: how far they reach, and that none goes through multicast."""

from __future__ import annotations

import re

import pytest
from harness import all_cases, launches_on

from tritonllm.kernels.targets import TARGETS

CASES = [case for key, case in all_cases().items() if key.startswith("peer_all_reduce-")]


def ptx(kernel: str, target: str) -> list[str]:
    launches = [launch for launch in launches_on(CASES[0], TARGETS[target]) if launch.kernel.fn.__name__ == kernel]
    assert launches
    return [launch.aot(TARGETS[target].gpu).asm["ptx"] for launch in launches]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_word_and_its_count_are_written_and_read_at_once(target: str) -> None:
    """Two words an instruction, past every cache that is not coherent between GPUs."""
    for text in ptx("_one_shot_kernel", target):
        assert re.search(r"st\.global\.wt\.v2\.b64", text)
        assert re.search(r"ld\.volatile\.global\.v2\.b64", text)
        assert "multimem" not in text


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_flags_are_released_and_acquired_over_the_whole_system(target: str) -> None:
    for text in ptx("_two_shot_kernel", target):
        atomics = re.findall(r"\batom\.\S+", text)
        assert len([one for one in atomics if "exch" in one]) == 2
        for one in atomics:
            parts = one.split(".")
            assert "sys" in parts
            assert ("release" if "exch" in parts else "acquire") in parts
        assert len(re.findall(r"ld\.global\.cg", text)) >= 2
        assert "multimem" not in text
