"""What values a field may take, as values: one `Rule` a field, checked in one loop.

In every rule a bool is not a number, and neither nan nor an infinity passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard


@dataclass(frozen=True)
class Rule:
    """A test of one value, and in words what passes it."""

    allowed: str
    accepts: Callable[[object], bool]

    def or_none(self) -> Rule:
        """The same rule for a field that may be left out."""
        return Rule(f"{self.allowed}, or None", lambda value: value is None or self.accepts(value))

    def or_off(self) -> Rule:
        """The same rule for a number that 0 or False turns off."""
        return Rule(f"{self.allowed}, or 0", lambda value: value in (0, False) or self.accepts(value))

    def check(self, name: str, value: object, error: type[Exception]) -> None:
        """Raise `error` naming the field, the value and what is allowed, unless the value passes."""
        if not self.accepts(value):
            raise error(f"{name}={value!r} is not valid: give {self.allowed}.")


def check_fields(owner: object, rules: Mapping[str, Rule], error: type[Exception]) -> None:
    """Check the attributes of `owner` that have a rule."""
    for name, rule in rules.items():
        rule.check(name, getattr(owner, name), error)


def integer(low: int, high: int | None = None) -> Rule:
    """A whole number in `[low, high]`."""
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    return Rule(allowed, lambda value: _is_int(value) and low <= value and (high is None or value <= high))


def integers(low: int, high: int) -> Rule:
    """A tuple of whole numbers, each in `[low, high]`."""
    element = integer(low, high)
    return Rule(
        f"a sequence whose items are each {element.allowed}",
        lambda value: isinstance(value, tuple) and all(map(element.accepts, value)),
    )


def weights(low: float, high: float, top: int) -> Rule:
    """A tuple of pairs, each a whole number from 0 to `top` and a number in `[low, high]`; no whole number twice."""
    key, value_ = integer(0, top), number(low, high)

    def accepts(value: object) -> bool:
        if not isinstance(value, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
            return False
        keys = [pair[0] for pair in value]
        return all(map(key.accepts, keys)) and len({*keys}) == len(keys) and all(value_.accepts(v) for _, v in value)

    return Rule(f"a mapping from token ids to {value_.allowed.replace('a finite number', 'finite numbers')}", accepts)


def positive_numbers() -> Rule:
    """A tuple of finite numbers above zero."""
    element = number(0, above=True)
    return Rule(
        f"a sequence whose items are each {element.allowed}",
        lambda value: isinstance(value, tuple) and all(map(element.accepts, value)),
    )


def even() -> Rule:
    """A whole number that splits into pairs."""
    return Rule("an even integer >= 2", lambda value: _is_int(value) and value >= 2 and value % 2 == 0)


def number(low: float, high: float | None = None, *, above: bool = False) -> Rule:
    """A finite int or float in `[low, high]`; with `above`, in `(low, high]`."""
    bound = f"{'>' if above else '>='} {low:g}"
    return Rule(
        f"a finite number {bound}" + ("" if high is None else f" and <= {high:g}"),
        lambda value: (
            _is_finite(value) and (value > low if above else value >= low) and (high is None or value <= high)
        ),
    )


def flag() -> Rule:
    """True or False, nothing that merely counts as one."""
    return Rule("True or False", lambda value: isinstance(value, bool))


def text() -> Rule:
    """A string that is not empty."""
    return Rule("a non-empty string", lambda value: isinstance(value, str) and bool(value.strip()))


def texts() -> Rule:
    """A tuple of strings, none of them empty."""
    return Rule(
        "a non-empty string or several",
        lambda value: isinstance(value, tuple) and all(isinstance(item, str) and item for item in value),
    )


def strings() -> Rule:
    """A list of strings, as JSON gives it."""
    return Rule(
        "a list of strings",
        lambda value: isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value),
    )


def one_of(*choices: str) -> Rule:
    """One of a few names."""
    return Rule("one of " + ", ".join(map(repr, choices)), lambda value: isinstance(value, str) and value in choices)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False
