"""Calls as bytes: what comes out is what went in, and a step that changes nothing costs a few bytes and no pickle."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from tritonllm.engine.plan import PrefillChunk, RowUpdate, StepPlan
from tritonllm.engine.rank_calls import decode_call, encode_call
from tritonllm.engine.sequence import Choice, RowSampling

SAMPLING = RowSampling(0.5, 3, 0.9, 2**63 + 1)
STEP = StepPlan(num_decode_rows=300, choice=Choice.REPORTED)
CHANGES: list[dict[str, Any]] = [
    {"row_updates": [RowUpdate(1, -1, 2, 33, [4, 5], SAMPLING)]},
    {"cleared_rows": [3]},
    {"new_blocks": [(0, 1, 7)]},
    {"chunks": [PrefillChunk([1, 2], 0, [9], True, SAMPLING)]},
    {"zero_blocks": [0]},
]


@pytest.mark.parametrize(
    "call",
    [
        ("exit", ()),
        ("launch", (STEP,)),
        ("launch", (StepPlan(),)),
        ("another", (STEP,)),
        ("launch", (STEP, 1)),
        *(("launch", (replace(STEP, **change),)) for change in CHANGES),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_call_comes_out_as_it_went_in(call: tuple[str, tuple[Any, ...]], kind: type) -> None:
    assert decode_call(kind(encode_call(*call))) == call


def test_a_step_that_changes_nothing_is_a_record_of_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **keys: Any) -> None:
        raise AssertionError("pickled")

    for name in ("dumps", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    sizes = set()
    for num_rows in (1, 64, 2**31 - 1):
        for choice in Choice:
            for waits in (False, True):
                plan = StepPlan(num_decode_rows=num_rows, choice=choice, waits_for_masks=waits)
                data = encode_call("launch", (plan,))
                assert decode_call(data) == ("launch", (plan,))
                sizes.add(len(data))
    assert sizes == {7}
    for change in CHANGES:
        with pytest.raises(AssertionError, match="pickled"):
            encode_call("launch", (replace(STEP, **change),))
