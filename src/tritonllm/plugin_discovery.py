"""Which plugins are installed, whose they are, and which of them the user allows.

The environment variable TRITONLLM_PLUGINS restricts plugins to a comma-separated list of distribution or entry-point
names; empty, it turns plugins off.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import traceback
import warnings

from tritonllm.hookspecs import PROJECT, ModelSpec

PLUGINS_VARIABLE = "TRITONLLM_PLUGINS"

OWN_DISTRIBUTION = "tritonllm-engine"
"""The distribution of the built-ins."""


@dataclasses.dataclass(frozen=True)
class Plugin:
    """What loading one entry point gave.

    Fields:
        name, value: the entry point, as in `name = "value"`.
        distribution, version: the package it belongs to.
        specs: the models it registered; empty if it failed.
        error: one sentence on why it was skipped, or None.
        seconds: time that importing and registering took.
        imports_torch: its import was the first to pull torch into the process, which makes every listing slow.
    """

    name: str
    value: str
    distribution: str
    version: str
    specs: tuple[ModelSpec, ...] = ()
    error: str | None = None
    seconds: float = 0.0
    imports_torch: bool = False

    @classmethod
    def of(cls, point: importlib.metadata.EntryPoint) -> Plugin:
        """An entry point before it is loaded."""
        name = _told(point.dist, "name") or "an unknown distribution"
        return cls(point.name, point.value, name, _told(point.dist, "version"))

    @property
    def owner(self) -> str:
        """Name and version of the distribution."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def failure(self) -> str:
        """Whose plugin failed, and why."""
        return f"Plugin {self.name!r} of {self.owner} failed: {self.error}"


def _told(dist: object, field: str) -> str:
    """Name or version of a distribution, empty where its metadata is gone, as after half a removal."""
    try:
        return getattr(dist, field, None) or ""
    except Exception:
        return ""


def installed_plugins() -> list[importlib.metadata.EntryPoint]:
    """The entry points of other packages, as TRITONLLM_PLUGINS allows; warns if it names one that is not there."""
    # Our own entry points only advertise the built-ins, which need no metadata to be found.
    points = [
        point
        for point in importlib.metadata.entry_points(group=PROJECT)
        if point.value.partition(":")[0] != "tritonllm.models"
    ]
    variable = os.environ.get(PLUGINS_VARIABLE)
    if variable is None:
        return points
    allowed = {canonical_name(name) for name in variable.split(",") if name.strip()}
    names = [{canonical_name(name) for name in (point.name, Plugin.of(point).distribution)} for point in points]
    absent = allowed.difference(*names)
    if absent:
        warnings.warn(f"{PLUGINS_VARIABLE} names no installed plugin: {', '.join(sorted(absent))}.", stacklevel=2)
    return [point for point, own in zip(points, names, strict=True) if own & allowed]


def canonical_name(name: str) -> str:
    """A distribution name in the normal form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def reason(error: BaseException) -> str:
    """What went wrong, in one line whatever the error has."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}".rstrip(".: ")


def place(error: BaseException, entry_point: str) -> str:
    """Where in a plugin's own package an error was last, " (package.module, line 3)"; empty if it was never there.

    Args:
        error: with its traceback.
        entry_point: the value of the plugin's entry point.
    """
    package = re.split(r"[.:\[]", entry_point)[0].strip()
    places = [
        f" ({module}, line {line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if (module := frame.f_globals.get("__name__", "")).partition(".")[0] == package
    ]
    return places[-1] if places else ""
