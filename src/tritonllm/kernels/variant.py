"""What Triton makes of a launch before it compiles: types, constants and alignments, for one target.

All of it comes from the code that Triton's own launch runs, so that a kernel compiled ahead of time has the key in
Triton's cache under which a launch looks it up.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITCallable, create_function_from_signature


@dataclass(frozen=True)
class Variant:
    """All that decides about a compiled kernel, as plain values that can be compared and sent to another process.

    Attributes:
        module, kernel: where the `@triton.jit` function is.
        target: the GPU.
        signature: type of each argument.
        constants: values of those that are compiled in.
        attributes: what is known of the others.
        options: of the compiler.
    """

    module: str
    kernel: str
    target: GPUTarget
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    attributes: tuple[tuple[tuple[int, ...], tuple[tuple[str, int], ...]], ...]
    options: tuple[tuple[str, Any], ...]

    def compile(self) -> Any:
        """Compile, or take from Triton's cache: `.asm` holds the stages, `.metadata.shared` bytes of shared memory."""
        kernel = getattr(importlib.import_module(self.module), self.kernel)
        make_source = GluonASTSource if kernel.is_gluon() else ASTSource
        settle_key(kernel)
        source = make_source(
            fn=kernel,
            signature=dict(self.signature),
            constexprs=dict(self.constants),
            attrs={index: [list(fact) for fact in facts] for index, facts in self.attributes},
        )
        return triton.compile(source, target=self.target, options=dict(self.options))


def variant(kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any], target: GPUTarget) -> Variant:
    """What a launch with these arguments, run-time and compile-time ones by name, is compiled to.

    A meta tensor counts as a part of memory that is aligned as the allocator aligns it.
    """
    settle_key(kernel)  # before a hash of the kernel is asked for, which holds its key
    backend, bind = _binder(kernel, target)
    keywords = {**arguments, **options}
    bound, specialization, _ = bind(**keywords)
    _, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, specialization, None)
    return Variant(
        module=kernel.fn.__module__,
        kernel=kernel.fn.__name__,
        target=target,
        signature=tuple(signature.items()),
        constants=tuple(constants.items()),
        attributes=tuple((index, tuple(map(tuple, facts))) for index, facts in attributes.items()),
        options=tuple(options.items()),
    )


def settle_key(kernel: Any) -> None:
    """Make the keys of the jitted functions that a kernel calls before its own, in Triton's cache of compiled kernels.

    Triton 3.6 puts the global constants of a function into the keys of its callers only if that function has its own
    key by then. So a kernel's key, there, depends on the kernels that a process looked at before, and another process
    would not find what this one compiled.
    """
    pending = [kernel] if kernel.hash is None else []
    while pending:
        function = pending[-1].fn
        callees = map(function.__globals__.get, function.__code__.co_names)
        new = [f for f in callees if isinstance(f, JITCallable) and f.hash is None and f not in pending]
        pending.extend(new)
        if not new:
            pending.pop().cache_key  # noqa: B018  a property that keeps what it makes


@cache
def _binder(kernel: Any, target: GPUTarget) -> tuple[Any, Any]:
    backend = make_backend(target)
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)
