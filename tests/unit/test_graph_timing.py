"""The clock of a chain of calls, with made-up graphs in place of a GPU's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tritonllm.bench import graph_timing


@pytest.mark.parametrize(("each", "launched"), [(600.0, [2]), (100.0, [2, 10]), (3.0, [2, 2 * 167])])
def test_a_short_chain_is_repeated(monkeypatch, each: float, launched: list[int]) -> None:
    counts: list[int] = []

    def graph(run: Callable[[], object]) -> float:
        calls.clear()
        run()
        counts.append(len(calls))
        return each * len(calls)

    calls: list[int] = []
    monkeypatch.setattr(graph_timing, "graph_microseconds", graph)
    taken = graph_timing.chain_microseconds([lambda: calls.append(1), lambda: calls.append(2)])
    assert taken == pytest.approx(each)
    assert counts == launched
    assert calls == [1, 2] * (launched[-1] // 2)
