"""Gluon under one name for each thing, whatever the version of Triton calls it: it is experimental and changes."""

from __future__ import annotations

from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import tma

# Both were renamed after Triton 3.6.
load_async = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""`load_async(descriptor, [row, column], barrier, shared)`: have TMA copy a box, and count its bytes at the barrier."""

reinterpret = (
    shared_memory_descriptor.reinterpret
    if hasattr(shared_memory_descriptor, "reinterpret")
    else shared_memory_descriptor._reinterpret
)
"""`reinterpret(shared, dtype, shape, layout)`: the same shared memory under another shape."""
