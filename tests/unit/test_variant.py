"""What Triton would make of a launch, without compiling it."""

from __future__ import annotations

import pytest
import triton
from triton.runtime.jit import JITCallable

from tritonllm.kernels.variant import settle_key


@triton.jit
def _inner(x):
    return x + 1


@triton.jit
def _middle(x):
    return _inner(x) + _inner(x)


@triton.jit
def _outer_kernel(x):
    _middle(x)
    _inner(x)


def test_the_keys_of_what_a_kernel_calls_are_made_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton 3.6 it would have another key if they were made after it, and not be found in a cache."""
    make_key, begun = JITCallable.cache_key.fget, []

    def watched(function: JITCallable) -> str:
        if function.hash is None:
            begun.append(function.fn.__name__)
        return make_key(function)

    monkeypatch.setattr(JITCallable, "cache_key", property(watched))
    settle_key(_outer_kernel)
    assert [name for name in begun if name.startswith("_")] == ["_inner", "_middle", "_outer_kernel"]
    settle_key(_outer_kernel)
    assert begun[-1] == "_outer_kernel"
