"""The cases of `tritonllm kernels bench` at tiny shapes: each op passes its check, and a wrong one does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tritonllm import kernels
from tritonllm.bench.kernels.case import Case, Heads, Place, worst_error
from tritonllm.bench.kernels.catalog import CASES
from tritonllm.kernels import reference

HEADS = Heads(4, 2, 16)
BLOCK = 16
TINY: list[Case] = [
    CASES["add_rms_norm"](3, 24),
    CASES["advance_rows"](5, 33, BLOCK),
    CASES["apply_rope"](HEADS, 5),
    CASES["decode_attention"](HEADS, 2, 21, BLOCK),
    CASES["decode_attention"](HEADS, 1, 32, BLOCK),
    CASES["fused_decode_attention"](HEADS, 2, 21, True, BLOCK),
    CASES["fused_decode_attention"](HEADS, 2, 17, False, BLOCK),
    CASES["decode_attention"](HEADS, 2, 21, BLOCK, 6),
    CASES["fused_decode_attention"](HEADS, 2, 21, True, BLOCK, 6),
    CASES["prefill_attention"]("portable", HEADS, 2, 9, 12, BLOCK, 6),
    CASES["gelu_and_mul"](3, 24),
    CASES["hopper_linear"](3, 64, 32),
    CASES["hopper_linear"](3, 64, 64, True),
    CASES["hopper_linear_parts"](3, 64, 64),
    CASES["kept_threshold"](100, 2, "peaked", top_p=0.9),
    CASES["kept_threshold"](100, 2, "flat", True, top_p=0.9),
    CASES["load_rows"](5, 33, BLOCK),
    CASES["longest_first"](20),
    CASES["merge_picks"](3, 2),
    CASES["adjust_logits"](700, 2),
    CASES["token_logprobs"](700, 2),
    CASES["pick_from_shard"](66, 2),
    CASES["pick_tokens"](100, 2),
    CASES["pick_tokens"](100, 2, greedy=True),
    CASES["prefill_attention"]("portable", HEADS, 2, 21, 0, BLOCK),
    CASES["prefill_attention"]("portable", HEADS, 2, 21, 12, BLOCK),
    CASES["prefill_attention"]("hopper", Heads(2, 1, 64), 1, 130, 0, 128),
    CASES["rms_norm"](3, 24),
    CASES["rope_store_kv"](HEADS, 21, True, BLOCK),
    CASES["rope_store_kv"](HEADS, 21, False, BLOCK),
    CASES["sample_tokens"](100, 2, "peaked", top_p=0.9),
    CASES["sample_tokens"](100, 2, "flat", True, top_p=0.9),
    CASES["silu_and_mul"](3, 24),
    CASES["skinny_linear"](1, 64, 32),
    CASES["skinny_linear"](3, 64, 32, True, True),
    CASES["skinny_linear"](3, 64, 32, False, False, True),
    CASES["store_kv"](HEADS, 21, BLOCK),
]


def named(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, id=f"{case.op} {case.shape}") for case in cases]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def place(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Place:
    return Place(device, dtypes[-1], rotated_bytes=1)


def test_every_op_has_a_tiny_case() -> None:
    assert {case.op for case in TINY} == set(CASES) == set(reference.__all__)


@pytest.mark.parametrize("case", named(TINY))
def test_an_op_passes_its_check(case: Case, place: Place) -> None:
    if place.device.type == "cuda" and case.unsupported(place):
        pytest.skip(case.unsupported(place))
    prepared = case.prepare(place)
    place.synchronize()
    assert prepared.op.error() <= prepared.op.bound
    assert len(prepared.op.calls) >= 2
    for call in prepared.op.calls:
        call()
    work = case.work(place.dtype.itemsize)
    assert work.bytes > 0
    assert (work.operations > 0) == (case.op.endswith("attention") or "linear" in case.op)


WRITTEN = {"advance_rows": 0, "apply_rope": 1, "store_kv": 2}
"""Which argument an op without a result writes to."""


@pytest.mark.parametrize("case", named(TINY))
def test_one_wrong_element_is_found(case: Case, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.device.type == "cuda" and case.unsupported(place):
        pytest.skip(case.unsupported(place))
    op = getattr(kernels, case.op)

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        changed = args[WRITTEN[case.op]] if result is None else result[0] if isinstance(result, tuple) else result
        last = changed[(-1,) * changed.dim()]
        last.copy_(last.nan_to_num() + 3 if last.is_floating_point() else torch.tensor(-1))
        return result

    monkeypatch.setattr(kernels, case.op, spoiled)
    prepared = case.prepare(place)
    place.synchronize()
    assert not prepared.op.error() <= prepared.op.bound


def test_an_error_is_relative_to_an_element_and_its_row() -> None:
    exact = torch.tensor([[1.0, -1.0, 1.0, -1.0], [100.0, 0.0, 0.0, 0.0]])
    assert worst_error(exact + torch.tensor([[0.1], [0.0]]), exact) == pytest.approx(0.1 / 2)
    assert worst_error(exact + torch.tensor([[0.0], [1.0]]), exact) == pytest.approx(1 / 50)


def test_nan_and_another_shape_are_wrong() -> None:
    heads = torch.zeros(2, 3)
    assert worst_error(heads, heads) == 0
    assert worst_error(torch.full_like(heads, float("nan")), heads) == float("inf")
    assert worst_error(heads[:1], heads) == float("inf")
