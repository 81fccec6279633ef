"""Triton's interpreter without the part of its work that it does again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Have Triton's interpreter put its own functions in the place of the language's at a launch alone.

    It does so again whenever a kernel calls a jitted function, which takes up to half of its time. To be called before
    the first launch.
    """
    patch = interpreter._patch_lang

    def patch_unless_done(function: Callable[..., Any]) -> Any:
        if any(tl.core.is_builtin(language.load) for language in _languages(function)):
            return patch(function)
        return interpreter._LangPatchScope()  # which takes nothing back

    interpreter._patch_lang = patch_unless_done


@cache
def _languages(function: Callable[..., Any]) -> list[ModuleType]:
    """The modules that a jitted function has the language from."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]
