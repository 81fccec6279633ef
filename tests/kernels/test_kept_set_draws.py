"""Draws from a kept set: above the bracket, from the list, from the row. All give the tokens of `pick_tokens`."""

from __future__ import annotations

import math

import pytest
import torch
from examples import LARGE, ON_GPU

from tritonllm.kernels import kept_set
from tritonllm.kernels.kept_set import plan_kept_threshold, plan_sample_tokens
from tritonllm.kernels.kept_set_passes import ABOVE, FINE_STEP, HIGH, LISTED, LOW
from tritonllm.testing.sampling_rows import Rows, generator, kept_by_sort, logits_row, strided

DRAWS = 400 if ON_GPU else 6


class Drawn:
    """Tokens of a plan, and what its passes handed on.

    Attributes:
        tokens: int32 [B].
        above: whether each was at or above the upper end of the bracket [B].
        listed, mass_above, low, high, step: by row, on the CPU.
    """

    def __init__(self, logits: torch.Tensor, rows: Rows, spoil: str = "", **sizes: int) -> None:
        """`spoil` names what is unreadable when the last pass runs: "list_ptr" or "logits_ptr"."""
        out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        parameters = rows.temperatures, rows.top_ks, rows.top_ps, rows.seeds, rows.positions
        plan = plan_sample_tokens(
            strided(logits, logits.device), *parameters, out, min_ps=vars(rows).get("min_ps"), **sizes
        )
        last = plan[-1]
        for launch in plan:
            if launch is last and spoil:
                last.args[spoil].fill_(-torch.inf if spoil == "list_ptr" else torch.nan)
            launch.run()
        bounds, sums = last.args["bounds_ptr"].cpu(), last.args["sums_ptr"].cpu()
        self.tokens = out.cpu()
        self.listed, self.mass_above = sums[:, LISTED.value], sums[:, ABOVE.value]
        self.low, self.high, self.step = (bounds[:, place.value] for place in (LOW, HIGH, FINE_STEP))
        chosen = logits.float().cpu().gather(1, self.tokens.long().clamp(min=0)[:, None])[:, 0]
        self.above = chosen >= self.high


def alike(parameters: tuple[int, float, float], device: torch.device, draws: int = DRAWS) -> Rows:
    """Rows that differ in their seeds and positions alone."""
    top_k, top_p, min_p = parameters
    return Rows([1.0] * draws, [top_k] * draws, [top_p] * draws, device, min_p=[min_p] * draws)


def picked_of_kept(logits: torch.Tensor, rows: Rows) -> list[int]:
    """What `pick_tokens` takes of the kept tokens, the others being -inf: all of it but the threshold is other code."""
    kept = logits.float() >= rows.threshold(logits)[:, None]
    return rows.pick(torch.where(kept, logits, -torch.inf))


def some_slots(rows: Rows, slots: list[int]) -> Rows:
    some = Rows.__new__(Rows)
    for name, value in vars(rows).items():
        setattr(some, name, value[slots])
    return some


@pytest.mark.parametrize("parameters", [(0, 0.8, 0.01), (40, 1.0, 0.0), (100, 0.9, 0.0)])
def test_a_list_without_an_upper_end_holds_all_that_is_drawn_from(
    device: torch.device, dtypes: tuple[torch.dtype, ...], parameters: tuple[int, float, float]
) -> None:
    for dtype in dtypes if ON_GPU else dtypes[:1]:
        logits = (logits_row("normal", 300) / 2).to(dtype).expand(DRAWS, -1).to(device)
        rows = alike(parameters, device)
        drawn = Drawn(logits, rows, "logits_ptr")
        assert bool(drawn.high.isinf().all())
        assert bool((drawn.listed < 300).all())
        assert drawn.tokens.tolist() == picked_of_kept(logits, rows)


def test_a_bracket_that_is_split_is_drawn_from_as_any_other(device: torch.device) -> None:
    for dtype in (torch.float16, torch.float32) if ON_GPU else (torch.float16,):
        logits = (logits_row("normal", 600) / 2.5).to(dtype).expand(DRAWS, -1).to(device)
        rows = alike((0, 0.8, 0.0), device)
        drawn = Drawn(logits, rows, "logits_ptr", tile=512, capacity=64)
        assert bool((drawn.step > 0).all())
        assert bool((drawn.mass_above > 0).all())
        assert bool((drawn.listed <= 64).all())
        assert drawn.tokens.tolist() == picked_of_kept(logits, rows)


def test_of_the_best_above_the_bracket_and_the_best_listed_the_better_wins(device: torch.device) -> None:
    """Of logits that lie on the edges, those at the upper end are not listed, and those at the lower end are."""
    logits = torch.full((1200,), -8.0)  # as far down as the edges go, so that they are whole numbers
    logits[5], logits[40:48] = 0.0, -1.0
    logits[100:112] = logits[160:178] = -2.0  # the second tile holds nothing larger
    mass = [math.exp(0.0) + 8 * math.exp(-1.0), 30 * math.exp(-2.0), 1161 * math.exp(-8.0)]
    logits = logits.expand(DRAWS, -1).to(device)
    rows = alike((0, (mass[0] + 0.5 * mass[1]) / sum(mass), 0.0), device)
    for dtype in (torch.float32, torch.float16) if ON_GPU else (torch.float32,):
        drawn = Drawn(logits.to(dtype), rows, "logits_ptr", tile=128, capacity=32)
        assert (drawn.low.unique().tolist(), drawn.high.unique().tolist()) == ([-2.0], [-1.0])
        assert drawn.listed.unique().tolist() == [30]
        assert drawn.above.unique().tolist() == [False, True], "all were drawn from one of the two"
        assert (drawn.mass_above.double() / 2**40).tolist() == pytest.approx([mass[0]] * DRAWS, rel=1e-6)
        assert drawn.tokens.tolist() == picked_of_kept(logits.to(dtype), rows)
        assert bool((rows.threshold(logits.to(dtype)) == -2.0).all())
        assert set(drawn.tokens.tolist()) <= {5, *range(40, 48), *range(100, 112), *range(160, 178)}


@pytest.mark.parametrize("parameters", [(0, 0.6, 0.0), (100, 1.0, 0.0), (100, 0.5, 0.1)])
def test_what_no_list_holds_is_drawn_from_the_row(device: torch.device, parameters: tuple[int, float, float]) -> None:
    """More equal logits than a list takes, and a larger top-k."""
    logits = torch.full((1, 300), -9.0)
    logits[0, 100:280] = 1.0
    logits[0, 281], logits[0, 282] = 1.5, 0.9
    logits = logits.expand(DRAWS, -1).to(device)
    rows = alike(parameters, device)
    drawn = Drawn(logits, rows, "list_ptr", tile=128, capacity=32)
    assert bool((drawn.listed > 32).all())
    assert drawn.tokens.tolist() == picked_of_kept(logits, rows)
    assert set(drawn.tokens.tolist()) <= {*range(100, 280), 281}


def test_a_list_that_overflows_spares_what_lies_behind_it(device: torch.device) -> None:
    logits, rows = torch.zeros(1, 300, device=device), alike((0, 0.6, 0.0), device, 1)
    out = torch.empty(1, dtype=torch.int32, device=device)
    parameters = rows.temperatures, rows.top_ks, rows.top_ps, rows.seeds, rows.positions
    behind = {"list_ptr": torch.full((48,), 7.0, device=device), "ids_ptr": torch.full((48,), 7, device=device).int()}
    for launch in plan_sample_tokens(logits, *parameters, out, tile=64, capacity=32):
        launch.args.update({name: buffer[:32].view(1, 32) for name, buffer in behind.items() if name in launch.args})
        launch.run()
    assert all(bool((buffer[32:] == 7).all()) for buffer in behind.values())
    assert out.tolist() == rows.pick(logits)


@pytest.mark.parametrize("listed", [127, 128, 129])
def test_ranks_find_what_a_search_finds(device: torch.device, monkeypatch: pytest.MonkeyPatch, listed: int) -> None:
    """Up to 128 tokens are compared each with each; the threshold is that of the longer way, equal logits or not."""
    parameters = [(0, 0.9, 0.0), (0, 0.3, 0.05), (40, 1.0, 0.0), (listed, 1.0, 0.0), (60, 0.7, 0.0), (90, 0.8, 0.2)]
    logits = torch.full((len(parameters), 300), -torch.inf)
    values = torch.randn(listed, generator=generator(listed)) * 2
    logits[:, 20 : 20 + listed] = values
    logits[1::2] = logits[1::2].round()  # ties
    logits = logits.to(device)
    top_ks, top_ps, min_ps = zip(*parameters, strict=True)
    rows = Rows([1.0] * len(parameters), top_ks, top_ps, device, min_p=min_ps)

    def thresholds() -> torch.Tensor:
        out = torch.empty(len(logits), device=device)
        spoiled = logits.clone()
        plan = plan_kept_threshold(spoiled, rows.temperatures, rows.top_ks, rows.top_ps, out, min_ps=rows.min_ps)
        for launch in plan:
            if launch is plan[-1]:
                assert bool((launch.args["sums_ptr"][:, LISTED.value] <= listed).all())
                spoiled.fill_(torch.nan)
            launch.run()
        return out

    ranked = thresholds()
    monkeypatch.setattr(kept_set, "_FEW", 1)
    assert torch.equal(ranked, thresholds())
    monkeypatch.setattr(kept_set, "_FEW", 256)
    assert torch.equal(ranked, thresholds())
    for row, (top_k, top_p, min_p) in enumerate(parameters):
        mine = (logits[row] >= ranked[row]).cpu()
        assert bool((mine == kept_by_sort(logits[row], 1.0, top_k, top_p, min_p)).all())


def mixed_rows(device: torch.device) -> tuple[torch.Tensor, Rows]:
    """Rows of every kind: filtered, plain, greedy, with ties, NaN and infinities."""
    logits = torch.randn(12, LARGE, generator=generator(6)) * 1.5
    logits[1] = logits[1].round()
    logits[2] = logits[2].round()
    logits[3, LARGE // 2] = torch.nan
    logits[4, 700] = torch.nan
    logits[5] = -torch.inf
    logits[6] = -torch.inf
    logits[6, [9, LARGE - 1]] = -3.0
    logits[7, [70, 1100]] = torch.inf
    logits[8, :] = 0.0
    logits[8, ::3] = -0.0
    logits[9, [1200, 3]] = torch.inf
    temperatures = [1.0, 0.8, 0.0, 1.0, 0.0, 1.0, 0.7, 1.0, 0.0, 0.0, 1.0, 1.3]
    top_ks = [0, 0, 40, 0, 3, 5, 9, 0, 2, 0, 0, 700]
    top_ps = [0.9, 0.95, 0.5, 0.9, 0.9, 0.9, 0.99, 0.9, 0.9, 0.9, 1.0, 0.9]
    min_ps = [0.0, 0.0, 0.5, 0.0, 0.0, 0.1, 0.0, 0.2, 0.0, 0.0, 0.1, 0.01]
    return logits.to(device), Rows(temperatures, top_ks, top_ps, device, min_p=min_ps)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning")
def test_tokens_depend_on_neither_programs_nor_tiles_nor_lists_nor_neighbours(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, rows = mixed_rows(device)
    expected = Drawn(logits, rows).tokens.tolist()
    assert [expected[row] for row in (3, 4, 5, 7, 8, 9)] == [-1, -1, 0, 70, 0, 3]
    assert expected[2] == logits[2].tolist().index(logits[2].max().item())
    assert expected[6] in (9, LARGE - 1)
    regular = [0, 1, 2, 6, 8, 10, 11]
    assert [expected[row] for row in regular] == picked_of_kept(logits[regular], some_slots(rows, regular))
    for span, tile, capacity in ((2, 512, 64), (3, 256, 256), (100, 256, 1)):
        monkeypatch.setattr(kept_set, "_span", lambda tiles, batch, device, span=span: min(span, tiles))
        assert Drawn(logits, rows, tile=tile, capacity=capacity).tokens.tolist() == expected
    for slots in ([0], [7, 1], [11, 4]):
        alone = Drawn(logits[slots], some_slots(rows, slots), tile=256)
        assert alone.tokens.tolist() == [expected[slot] for slot in slots]


@pytest.mark.parametrize("capacity", [512, 32])
def test_of_equal_scores_the_lowest_id_wins(device: torch.device, capacity: int) -> None:
    """At 2^21 the noise is lost in rounding: the scores of equal logits are equal, on a list or too many for one."""
    logits = torch.zeros(4, 600)
    logits[:, 431:] = 2.0**21
    logits[1, 17] = 2.0**21
    logits[2, 500] = logits[2, 520] = 2.0**21 + 1
    logits[3, 599] = 2.0**21 + 1
    rows = Rows([1e-3] * 4, [0, 0, 1, 160], [0.9, 0.9, 1.0, 0.9], device)
    drawn = Drawn(logits.to(device), rows, tile=128, capacity=capacity)
    assert drawn.tokens.tolist() == [431, 17, 500, 599]
