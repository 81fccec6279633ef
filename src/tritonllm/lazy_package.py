"""Packages whose public names are imported when first used, so that importing the package costs next to nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """A package that looks a public name up in the module where it lives, each time it is asked.

    The import system binds every submodule in its package. Where a submodule is called like the function in it, as
    `kernels.decode_attention` is, that would make the meaning of the name depend on what was imported before. So such
    a submodule is not bound: the package's attribute is always the function, and `from package.name import ...` and
    `importlib.import_module("package.name")` always reach the module.
    """

    def __getattr__(self, name: str) -> Any:
        home = self.__dict__["_home"].get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in self.__dict__["_home"]):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return self.__dict__["__all__"]


def make_lazy(package: str, home: Mapping[str, str]) -> None:
    """Turn the package whose `__init__` calls this into a lazy one.

    A class and not a module's `__getattr__`: type checkers take that as leave for any name at all, and it could not
    keep submodules from being bound.

    Args:
        package: its `__name__`; it has an `__all__`.
        home: public name to the module that defines it.
    """
    module = sys.modules[package]
    module.__dict__["_home"] = home
    module.__class__ = _LazyPackage
