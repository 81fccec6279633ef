"""From measured times to a tuning table: decisions alone; `linears` and `decode_layer` measure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tritonllm.kernels.skinny_form import Form
from tritonllm.kernels.tuning_table import LinearKey, PathLimit

WORTH = 0.02
"""Share of a time that has to be gained to change what would run otherwise; two measurements differ by less."""

WORTH_OF_A_PATH = 0.01
"""The same where whole layers were measured, whose times are those of many kernels."""


@dataclass(frozen=True)
class LinearTimes:
    """Microseconds of one linear layer with one number of tokens.

    Attributes:
        key: its entry in a table.
        rules, rules_us: what the rules choose, and its time.
        best, best_us: the fastest form, maybe the same.
    """

    key: LinearKey
    rules: Form
    rules_us: float
    best: Form
    best_us: float

    @property
    def is_worth_an_entry(self) -> bool:
        """Whether the fastest form is another than the rules' choice and beats it by more than noise."""
        return self.best != self.rules and self.best_us < self.rules_us * (1 - WORTH)


def best_forms(times: Iterable[LinearTimes]) -> dict[LinearKey, Form]:
    """Forms to keep. Of several layers with one key, with and without a residual, the one that gains most decides."""
    by_gain = sorted(times, key=lambda each: each.best_us / each.rules_us, reverse=True)
    return {each.key: each.best for each in by_gain if each.is_worth_an_entry}


def best_paths(times: Mapping[int, Mapping[str, float]]) -> tuple[PathLimit, ...]:
    """Limits of the fastest paths, for a tuning table.

    From one batch to the next larger one the path changes only if that gains more than `WORTH_OF_A_PATH`. A batch
    decides for all that are larger than the measured one before it; above the largest, "separate" serves.

    Args:
        times: by rows of the batch, the time of each path that could run.
    """
    limits: list[PathLimit] = []
    for rows in sorted(times):
        measured = times[rows]
        path = min(measured, key=lambda name: measured[name])
        before = limits[-1].path if limits else path
        if before in measured and measured[path] >= measured[before] * (1 - WORTH_OF_A_PATH):
            path = before
        if limits and path == before:
            limits.pop()
        limits.append(PathLimit(rows, path))
    if limits and limits[-1].path == "separate":
        limits.pop()
    return tuple(limits)
