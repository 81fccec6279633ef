"""A call of a runner's method as bytes: a few fixed ones for the step that most steps are, a pickle for the rest."""

from __future__ import annotations

import pickle
import struct
from typing import Any

from tritonllm.engine.plan import StepPlan
from tritonllm.engine.sequence import Choice

_UNCHANGED_STEP = struct.Struct("=cIB?")
_STEP, _PICKLE = b"s", b"p"


def encode_call(method: str, args: tuple[Any, ...]) -> bytes:
    """Bytes of a call; an unchanged decode step is always of the same few."""
    if method == "launch" and len(args) == 1 and isinstance(args[0], StepPlan) and args[0].is_unchanged:
        plan = args[0]
        return _UNCHANGED_STEP.pack(_STEP, plan.num_decode_rows, plan.choice, plan.waits_for_masks)
    return _PICKLE + pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL)


def decode_call(data: bytes | bytearray) -> tuple[str, tuple[Any, ...]]:
    """`(method, args)` of what `encode_call` made."""
    if data[:1] == _STEP:
        _, num_decode_rows, choice, waits = _UNCHANGED_STEP.unpack(data)
        return "launch", (StepPlan(num_decode_rows, choice=Choice(choice), waits_for_masks=waits),)
    return pickle.loads(memoryview(data)[1:])
