"""What top-k and top-p keep, against the definition computed in float64 with a sort."""

from __future__ import annotations

import pytest
import torch
from examples import LARGE, ON_GPU, few_examples, seeds_of_tests, sizes
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.testing.sampling_rows import DISTRIBUTIONS, Rows, generator, kept_by_sort, logits_row, strided


def assert_kept(logits: torch.Tensor, rows: Rows) -> list[int]:
    """Thresholds keep what the sort keeps, up to the rounding of p times the mass; returns how many tokens stay."""
    kept = logits.float() >= rows.threshold(logits)[:, None]
    parameters = zip(rows.temperatures.tolist(), rows.top_ks.tolist(), rows.top_ps.tolist(), strict=True)
    for row, (temperature, top_k, top_p) in enumerate(parameters):
        slack = 1e-5 * top_p if top_p < 1 else 0.0
        least = kept_by_sort(logits[row], temperature, top_k, top_p - slack)
        most = kept_by_sort(logits[row], temperature, top_k, min(top_p + slack, 1 - 1e-9) if top_p < 1 else 1.0)
        mine = kept[row].cpu()
        assert bool((least <= mine).all()), f"row {row}: drops {(least & ~mine).sum()} of {least.sum()}"
        assert bool((mine <= most).all()), f"row {row}: keeps {(mine & ~most).sum()} beyond {most.sum()}"
    return kept.sum(dim=1).tolist()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_kept_set_is_that_of_a_sort(device: torch.device, dtypes: tuple[torch.dtype, ...], name: str | float) -> None:
    top_ps = [1e-9, 0.3, 0.95, 0.999, 1.0, 0.8]
    top_ks = [0, 0, 0, 0, 50, 50]
    temperatures = [1.0, 1.0, 0.7, 1.3, 1.0, 1.0]
    for dtype in dtypes if ON_GPU or name == "normal" else dtypes[:1]:
        logits = logits_row(name, LARGE).to(dtype).expand(len(top_ps), -1)
        rows = Rows(temperatures, top_ks, top_ps, device)
        counts = assert_kept(strided(logits, device), rows)
        if name == "equal":
            assert counts == [LARGE] * len(counts)


@few_examples
@given(seed=seeds_of_tests, size=sizes, data=st.data())
def test_kept_set_of_random_rows(
    device: torch.device, dtypes: tuple[torch.dtype, ...], seed: int, size: int, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(dtypes))
    gen = generator(seed)
    scales = 10.0 ** (torch.rand(3, 1, generator=gen) * 5 - 3)
    logits = torch.randn(3, size, generator=gen) * scales + torch.randn(3, 1, generator=gen) * 5
    if data.draw(st.booleans()):
        logits = logits.round(decimals=1)  # ties
    temperatures = (torch.rand(3, generator=gen) * 2 + 0.05).tolist()
    top_ks = torch.randint(-1, size + 2, (3,), generator=gen).tolist()
    top_ps = torch.rand(3, generator=gen).clamp(min=0.01).tolist()
    top_ps[seed % 3] = 1.0
    rows = Rows(temperatures, top_ks, top_ps, device, seed)
    logits = strided(logits.to(dtype), device)
    assert_kept(logits, rows)


def test_edges_of_top_k_and_top_p(device: torch.device) -> None:
    halves = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()[torch.tensor([3, 1, 0, 4, 2])]
    cases = [  # top_k, top_p, kept
        (0, 1.0, 5),
        (0, 0.499, 1),
        (0, 0.501, 2),
        (0, 0.751, 3),
        (0, 0.876, 5),  # the two smallest are equal: both or none
        (0, 0.0, 1),
        (0, -1.0, 1),
        (0, 1.5, 5),
        (1, 1.0, 1),
        (4, 1.0, 5),  # equals of the fourth stay with it
        (5, 1.0, 5),
        (6, 1.0, 5),
        (-1, 1.0, 5),
        (2, 0.66, 1),  # 0.5 is two thirds of what the top 2 hold
        (2, 0.67, 2),
        (3, 0.999, 3),
    ]
    rows = Rows([1.0] * len(cases), [case[0] for case in cases], [case[1] for case in cases], device)
    logits = halves.expand(len(cases), -1).contiguous().to(device)
    kept = logits >= rows.threshold(logits)[:, None]
    assert kept.sum(dim=1).tolist() == [case[2] for case in cases]


@few_examples
@given(seed=seeds_of_tests, size=sizes, data=st.data())
def test_min_p_of_random_rows(
    device: torch.device, dtypes: tuple[torch.dtype, ...], seed: int, size: int, data: st.DataObject
) -> None:
    """Alone, with top-k, and before top-p, whose share is of the mass that min-p leaves."""
    dtype = data.draw(st.sampled_from(dtypes))
    gen = generator(seed)
    logits = strided((torch.randn(4, size, generator=gen) * 4).to(dtype), device)
    min_ps = [*(torch.rand(3, generator=gen) ** 3).clamp(min=1e-6).tolist(), 0.0]
    top_ks, top_ps = [0, 5, 0, 0], [1.0, 1.0, 0.7, 1.0]
    temperatures = (torch.rand(4, generator=gen) * 2 + 0.05).tolist()
    rows = Rows(temperatures, top_ks, top_ps, device, seed, min_ps)
    thresholds = rows.threshold(logits)
    assert thresholds[3] == -torch.inf
    kept = (logits.float() >= thresholds[:, None]).cpu()
    for row in range(4):
        slack = 1e-5 if top_ps[row] < 1 else 0.0
        settings = temperatures[row], top_ks[row]
        least = kept_by_sort(logits[row], *settings, top_ps[row] - slack, min_ps[row] * (1 + 1e-4))
        most = kept_by_sort(logits[row], *settings, top_ps[row] + slack, min_ps[row] * (1 - 1e-4))
        assert bool((least <= kept[row]).all())
        assert bool((kept[row] <= most).all())


def test_edges_of_min_p(device: torch.device) -> None:
    halves = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()
    cases = [  # top_k, top_p, min_p, kept
        (0, 1.0, 0.0, 5),
        (0, 1.0, -1.0, 5),
        (0, 1.0, 1e-30, 5),
        (0, 1.0, 0.124, 5),  # the two smallest are an eighth of the largest
        (0, 1.0, 0.126, 3),
        (0, 1.0, 0.51, 1),
        (0, 1.0, 1.0, 1),
        (0, 1.0, 7.0, 1),
        (2, 1.0, 0.126, 2),
        (4, 1.0, 0.26, 2),
        (0, 0.66, 0.26, 1),  # 0.5 is two thirds of what min-p leaves
        (0, 0.67, 0.26, 2),
        (0, 0.0, 0.126, 1),
    ]
    columns = list(zip(*cases, strict=True))
    rows = Rows([1.0] * len(cases), columns[0], columns[1], device, min_p=columns[2])
    logits = halves.expand(len(cases), -1).contiguous().to(device)
    kept = logits >= rows.threshold(logits)[:, None]
    assert kept.sum(dim=1).tolist() == list(columns[3])


def test_min_p_leaves_greedy_rows_and_rows_with_nan_alone(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, torch.nan], [-torch.inf] * 3], device=device)
    rows = Rows([0.0, 1.0, 1.0], [0] * 3, [1.0] * 3, device, min_p=[0.9] * 3)
    thresholds = rows.threshold(logits)
    assert thresholds[0] == thresholds[2] == -torch.inf
    assert bool(thresholds[1].isnan())
    assert rows.sample(logits) == [1, -1, 0]


def test_both_zeros_are_equal(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        logits = torch.tensor([[-0.0, -1.0, 0.0, -2.0], [0.0, -1.0, -0.0, -2.0]], dtype=dtype, device=device)
        rows = Rows([1.0, 1.0], [1, 1], [1.0, 0.5], device)
        assert (logits >= rows.threshold(logits)[:, None]).sum(dim=1).tolist() == [2, 2]
        assert Rows([0.0, 0.0], [0, 0], [1.0, 1.0], device).pick(logits) == [0, 0]
