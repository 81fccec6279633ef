"""Each way that the search for a threshold can take, by list or row, one bracket or two. All give the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from examples import LARGE, ON_GPU

from tritonllm.errors import KernelError
from tritonllm.kernels import kept_set
from tritonllm.kernels.kept_set import plan_kept_threshold
from tritonllm.kernels.kept_set_passes import COARSE, FINE_STEP, HIGH, LISTED, LOW, SUMS
from tritonllm.testing.sampling_rows import Rows, generator, kept_by_sort, logits_row, strided

SMALL = 1503  # tokens of which a bracket of the coarse edges fits the list

# top_k, top_p, min_p
PARAMETERS = [(0, 0.9, 0.0), (0, 0.97, 0.02), (40, 1.0, 0.0), (40, 0.8, 0.0), (60, 0.9, 0.05), (500, 0.95, 0.0)]


def parameters_of(rows: list[tuple[int, float, float]], device: torch.device, temperature: float = 1.0) -> Rows:
    top_ks, top_ps, min_ps = zip(*rows, strict=True)
    return Rows([temperature] * len(rows), top_ks, top_ps, device, min_p=min_ps)


def thresholds_of(
    logits: torch.Tensor,
    rows: Rows,
    before_last: Callable[[dict[str, torch.Tensor]], None] = lambda args: None,
    before_fine: Callable[[dict[str, torch.Tensor]], None] = lambda args: None,
    **sizes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Thresholds [B], tokens listed [B] and steps of the fine edges [B]; the hooks may spoil what passes hand on."""
    out = torch.empty(len(logits), device=logits.device)
    plan = plan_kept_threshold(
        logits, rows.temperatures, rows.top_ks, rows.top_ps, out, min_ps=vars(rows).get("min_ps"), **sizes
    )
    _, coarse, fine, _, last = plan
    for launch in plan:
        if launch is fine:
            before_fine(coarse.args)
        if launch is last:
            before_last(last.args)
        launch.run()
    return out, last.args["sums_ptr"][:, LISTED.value].cpu(), last.args["bounds_ptr"][:, FINE_STEP.value].cpu()


def forget_logits(args: dict[str, torch.Tensor]) -> None:
    args["logits_ptr"].fill_(torch.nan)


def forget_list(args: dict[str, torch.Tensor]) -> None:
    """To what weighs nothing. (The mass of infinity is a number that depends on the hardware.)"""
    args["list_ptr"].fill_(-torch.inf)


def assert_kept(logits: torch.Tensor, thresholds: torch.Tensor, parameters: list[tuple[int, float, float]]) -> None:
    for row, (top_k, top_p, min_p) in enumerate(parameters):
        mine = (logits[row].float() >= thresholds[row]).cpu()
        slack = 1e-5 if top_p < 1 else 0.0
        least = kept_by_sort(logits[row], 1.0, top_k, top_p - slack, min_p * (1 + 1e-4))
        most = kept_by_sort(logits[row], 1.0, top_k, top_p + slack, min_p * (1 - 1e-4))
        assert bool((least <= mine).all())
        assert bool((mine <= most).all())


@pytest.mark.parametrize("name", ["normal", pytest.param(0.41, marks=pytest.mark.slow)])
def test_the_size_of_the_list_does_not_matter(device: torch.device, name: str | float) -> None:
    parameters = PARAMETERS if ON_GPU else PARAMETERS[3:]
    for dtype in (torch.float32, torch.float16) if name != "normal" or ON_GPU else (torch.float16,):
        logits = strided(logits_row(name, LARGE).to(dtype).expand(len(parameters), -1), device)
        rows = parameters_of(parameters, device)
        expected, listed, _ = thresholds_of(logits, rows, tile=512)
        assert int(listed.max()) <= 8192
        assert_kept(logits, expected, parameters)
        for capacity in (1, 32) if ON_GPU else (32,):
            thresholds, _, _ = thresholds_of(logits, rows, tile=512, capacity=capacity)
            assert torch.equal(thresholds, expected)


def test_a_list_that_holds_the_threshold_is_all_the_last_pass_reads(device: torch.device) -> None:
    logits = strided(logits_row("normal", SMALL).expand(len(PARAMETERS), -1), device)
    rows = parameters_of(PARAMETERS, device)
    expected, _, _ = thresholds_of(logits, rows)
    thresholds, listed, steps = thresholds_of(logits, rows, forget_logits)
    assert torch.equal(thresholds, expected)
    assert not steps.any(), "a bracket was split that fits the list"
    assert (listed[:2] < SMALL // 4).all(), "top-p lists what lies outside its bracket"


def test_a_bracket_that_is_too_full_is_split(device: torch.device) -> None:
    parameters = [*PARAMETERS[:5], (0, 0.5, 0.0)]
    logits = strided((logits_row("normal", SMALL) / 4).expand(len(parameters), -1), device)
    rows = parameters_of(parameters, device)
    expected, _, steps = thresholds_of(logits, rows)
    assert not steps.any()
    thresholds, listed, steps = thresholds_of(logits.clone(), rows, forget_logits, tile=512, capacity=128)
    top_p = torch.tensor([top_k == 0 for top_k, _, _ in parameters])
    assert bool((steps[top_p] > 0).all())
    assert bool((listed <= 128).all())
    assert torch.equal(thresholds, expected)


@pytest.mark.parametrize(("equal", "held"), [(32, True), (33, False)])
def test_a_list_may_be_full_and_not_more(device: torch.device, equal: int, held: bool) -> None:
    """Equal logits cannot be split, so they are listed together."""
    parameters = [(0, 0.5, 0.0), (equal - 1, 1.0, 0.0), (equal - 1, 0.5, 0.0)]
    logits = torch.full((len(parameters), 300), -20.0)
    logits[:, 7 : 7 + equal] = 3.0
    logits[:, 100:140] = -1.0
    rows = parameters_of(parameters, device)
    spoil = forget_logits if held else forget_list
    thresholds, listed, _ = thresholds_of(logits.to(device), rows, spoil, capacity=32)
    assert listed.tolist() == [equal] * len(parameters)
    assert thresholds.tolist() == [3.0] * len(parameters)


def test_a_top_k_beyond_the_list_is_found_in_the_row(device: torch.device) -> None:
    parameters = [(100, 1.0, 0.0), (100, 0.95, 0.3)]
    logits = strided((torch.randn(2, 300, generator=generator(4)) * 2).round(decimals=1), device)
    rows = parameters_of(parameters, device)
    expected, _, _ = thresholds_of(logits, rows)
    thresholds, listed, _ = thresholds_of(logits, rows, forget_list, capacity=64)
    assert bool((listed > 64).all())
    assert torch.equal(thresholds, expected)
    assert_kept(logits, thresholds, parameters)


def test_few_tokens_above_minus_infinity_are_all_listed(device: torch.device) -> None:
    """What a grammar leaves: fewer tokens than top-k, whose k-th largest logit is then -inf."""
    parameters = [(50, 1.0, 0.0), (50, 0.6, 0.0), (50, 0.99, 0.0), (50, 1.0, 0.3), (0, 0.6, 0.0)]
    logits = torch.full((len(parameters), 300), -torch.inf)
    logits[:, [3, 77, 290]] = torch.tensor([0.5, 0.3, 0.2]).log()
    rows = parameters_of(parameters, device)
    spoiled = strided(logits, device)
    thresholds, listed, _ = thresholds_of(spoiled, rows, forget_logits, tile=128, capacity=32)
    assert bool((listed <= 3).all())
    kept = logits >= thresholds.cpu()[:, None]
    assert kept.sum(dim=1).tolist() == [300, 2, 3, 3, 2]


@pytest.mark.parametrize("few", [1, 128])
@pytest.mark.parametrize("amount", [0, 2**61])
def test_rough_sums_decide_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, amount: int, few: int
) -> None:
    """Whatever the edges seem to hold, and wherever the bracket is put, the exact sums notice."""
    monkeypatch.setattr(kept_set, "_FEW", few)
    parameters = [(0, 0.9, 0.02), (40, 0.8, 0.0), (0, 0.9, 0.0)]
    logits = strided(logits_row("normal", 500).half().expand(len(parameters), -1), device)
    rows = parameters_of(parameters, device)
    expected, _, _ = thresholds_of(logits, rows)

    def spoil_edges(args: dict[str, torch.Tensor]) -> None:
        args["sums_ptr"][:, COARSE.value : SUMS.value] = amount

    for capacity in (64, 512):
        thresholds, _, _ = thresholds_of(logits, rows, before_fine=spoil_edges, capacity=capacity)
        assert torch.equal(thresholds, expected)


@pytest.mark.parametrize("ends", [(-9.0, -8.0), (9.0, 10.0), (torch.nan, torch.nan), (-torch.inf, torch.inf)])
def test_the_row_is_searched_wherever_the_bracket_was(device: torch.device, ends: tuple[float, float]) -> None:
    parameters = [(0, 0.9, 0.0), (60, 0.9, 0.05)]
    logits = strided(logits_row("normal", 500).half().expand(len(parameters), -1), device)
    rows = parameters_of(parameters, device)
    expected, _, _ = thresholds_of(logits, rows)

    def spoil_bracket(args: dict[str, torch.Tensor]) -> None:
        forget_list(args)
        args["bounds_ptr"][:, LOW.value], args["bounds_ptr"][:, HIGH.value] = ends

    thresholds, _, _ = thresholds_of(logits, rows, spoil_bracket, capacity=1)
    assert torch.equal(thresholds, expected)


def test_infinite_logits(device: torch.device) -> None:
    """If the largest is infinite its equals share all mass; top-k counts as ever."""
    logits = torch.randn(6, 100, generator=generator(2))
    logits[:, [5, 50]] = torch.inf
    logits[5] = -torch.inf
    parameters = [(0, 0.9, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (5, 0.999, 0.0), (0, 1.0, 0.5), (3, 0.5, 0.5)]
    thresholds, _, _ = thresholds_of(logits.to(device), parameters_of(parameters, device), tile=64, capacity=16)
    kept = (logits >= thresholds.cpu()[:, None]).sum(dim=1)
    assert kept.tolist() == [2, 2, 5, 2, 2, 100]


def test_launches_depend_on_nothing(device: torch.device) -> None:
    for batch, size, dtype in ((1, 1, torch.float32), (3, 300, torch.float16), (2, 9000, torch.float32)):
        logits = torch.zeros(batch, size, dtype=dtype, device=device)
        rows = Rows([1.0] * batch, [0] * batch, [0.9] * batch, device)
        plan = plan_kept_threshold(logits, rows.temperatures, rows.top_ks, rows.top_ps, torch.empty(batch))
        assert len(plan) == 5


def test_a_list_of_an_odd_size_is_refused(device: torch.device) -> None:
    rows = Rows([1.0], [0], [0.9], device)
    with pytest.raises(KernelError, match="capacity must be a power of two, not 12"):
        thresholds_of(torch.zeros(1, 8, device=device), rows, capacity=12)
