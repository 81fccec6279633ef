"""Token choice: the first maximum, draws against their distribution, and rows against each other."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from examples import LARGE, ON_GPU, few_examples, seeds_of_tests, sizes
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.kept_set import plan_kept_threshold, plan_sample_tokens
from tritonllm.kernels.noise import MIN_TEMPERATURE, gumbel_tile, has_hardware_log
from tritonllm.kernels.reference import sampling as reference
from tritonllm.kernels.sampling import merge_picks, pick_from_shard, pick_tokens, plan_pick_tokens, sample_tokens
from tritonllm.testing.sampling_rows import Rows, generator, kept_by_sort, strided

TINY = (0.0, 1e-45, 1e-38, 1e-10, 1e-6, MIN_TEMPERATURE.value, 1e-4, 1e-2)


@triton.jit(do_not_specialize=["position", "first_id"])
def _write_noise_kernel(out_ptr, seeds_ptr, position, first_id, TILE: tl.constexpr, HARDWARE_LOG: tl.constexpr):
    noise = gumbel_tile(tl.load(seeds_ptr), tl.load(seeds_ptr + 1), position, first_id, TILE, HARDWARE_LOG)
    tl.store(out_ptr + tl.arange(0, TILE), noise)


def test_philox_gives_the_published_words() -> None:
    # Known answers that come with the authors' Random123 library.
    ones, zero = torch.tensor([0xFFFFFFFF]), torch.tensor([0])
    for word, rounds, expected in (
        (zero, 7, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (zero, 10, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (ones, 10, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        words = reference.philox([word] * 4, (word, word), rounds)
        assert [int(w) for w in words] == expected


@given(seed=seeds_of_tests, position=st.integers(0, 2**31 - 1), quad=st.integers(0, 100))
def test_noise_is_that_of_the_reference(device: torch.device, seed: int, position: int, quad: int) -> None:
    seeds = torch.randint(-(2**31), 2**31 - 1, (1, 2), generator=generator(seed), dtype=torch.int32)
    tile, first = 256, 4 * quad
    out = torch.empty(tile, device=device)
    hardware_log = has_hardware_log(device)
    _write_noise_kernel[(1,)](out, seeds.to(device), position, first, TILE=tile, HARDWARE_LOG=hardware_log)
    expected = reference.gumbel_noise(seeds, torch.tensor([position], dtype=torch.int32), first + tile)[0, first:]
    # Two logs, each within 2 ULP of its value, and a log of E has the relative error of E as an absolute one. That of
    # the hardware is off by 2^-22, where E is at least 1/32.
    torch.testing.assert_close(out.cpu(), expected, rtol=4e-7, atol=6e-6 if hardware_log else 1e-6)


def test_noise_has_its_distribution() -> None:
    seeds = torch.tensor([[7, 9]], dtype=torch.int32)
    noise = reference.gumbel_noise(seeds, torch.tensor([3], dtype=torch.int32), 400_000)[0].double()
    uniform = (-(-noise).exp()).exp().sort().values
    distance = (uniform - (torch.arange(len(uniform)) + 0.5) / len(uniform)).abs().max()
    assert distance * len(uniform) ** 0.5 < 1.63  # Kolmogorov-Smirnov at 1 %


@given(seed=seeds_of_tests, size=sizes, data=st.data())
def test_greedy_is_the_first_maximum(
    device: torch.device, dtypes: tuple[torch.dtype, ...], seed: int, size: int, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(dtypes))
    levels = data.draw(st.sampled_from((1, 3, 1000)))  # few levels: many ties
    logits = torch.randint(-levels, levels, (2, size), generator=generator(seed)).to(dtype)
    expected = [row.tolist().index(row.max().item()) for row in logits]
    rows = Rows([0.0] * 2, [0, 2], [1.0, 0.1], device, seed)
    assert rows.pick(strided(logits, device)) == expected
    assert rows.sample(strided(logits, device)) == expected


@pytest.mark.parametrize("scale", [1.0, 50.0, 1e30])
def test_tiny_temperatures_are_greedy(device: torch.device, dtypes: tuple[torch.dtype, ...], scale: float) -> None:
    for dtype in dtypes:
        if scale > torch.finfo(dtype).max:
            continue
        # A lead of 0.4, more than 26.1 times the largest of these temperatures.
        logits = torch.tensor([[-1.0, 0.6, -torch.inf, 1.0, 0.0]]).mul(scale).to(dtype)
        logits = logits.expand(len(TINY), -1).contiguous().to(device)
        rows = Rows(list(TINY), [0] * len(TINY), [1.0] * len(TINY), device)
        assert rows.pick(logits) == [3] * len(TINY)
        if dtype == torch.float32:
            rows = Rows(list(TINY), [2] * len(TINY), [0.9] * len(TINY), device)
            assert rows.sample(logits) == [3] * len(TINY)


def test_below_the_threshold_a_tie_goes_to_the_lowest_id(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]]).expand(8, -1).contiguous().to(device)
    below = Rows([MIN_TEMPERATURE.value / 2] * 8, [0] * 8, [1.0] * 8, device)
    above = Rows([1e-3] * 8, [0] * 8, [1.0] * 8, device)
    assert below.pick(logits) == [1] * 8
    assert set(above.pick(logits)) == {1, 2, 3}


@pytest.mark.parametrize("place", [0, LARGE - 1])
def test_a_row_with_nan_gives_minus_one_and_harms_no_other(device: torch.device, place: int) -> None:
    logits = torch.randn(4, LARGE, generator=generator(1))
    rows = Rows([0.0, 0.0, 0.8, 1.0], [0, 0, 0, 20], [1.0, 1.0, 0.7, 0.9], device)
    picked, sampled = rows.pick(logits.to(device)), rows.sample(logits.to(device))
    for row in (1, 3):
        logits[row, place] = torch.nan
        picked[row] = sampled[row] = -1
    assert rows.pick(logits.to(device)) == picked
    assert rows.sample(logits.to(device)) == sampled
    assert rows.threshold(logits.to(device)).isnan().tolist() == [False, True, False, True]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy on inf - inf, which the kernel selects away
def test_minus_infinity_is_chosen_only_if_all_logits_are(device: torch.device) -> None:
    logits = torch.full((6, 33), -torch.inf)
    logits[1, 20] = logits[2, 20] = logits[3, 20] = -60.0
    logits[4, 20:23] = torch.tensor([1.0, 1.0, 1.1])
    temperatures, top_ks, top_ps = [1.0, 0.0, 1.0, 2.0, 0.5, 1.0], [0, 0, 9, 0, 2, 5], [0.9, 1.0, 1.0, 0.5, 1.0, 1.0]
    rows = Rows(temperatures, top_ks, top_ps, device)
    for tokens in (rows.pick(logits.to(device)), rows.sample(logits.to(device))):
        assert tokens[:4] == [0, 20, 20, 20]
        assert tokens[4] in (20, 21, 22)
        assert tokens[5] == 0


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy on inf - inf, which the kernel selects away
def test_plus_infinity_wins(device: torch.device) -> None:
    logits = torch.randn(3, 100, generator=generator(0))
    logits[:, 40] = logits[:, 60] = torch.inf
    rows = Rows([0.0, 1.0, 1.0], [0, 0, 5], [1.0, 0.5, 1.0], device)
    assert rows.pick(logits.to(device)) == rows.sample(logits.to(device)) == [40] * 3


@few_examples
@given(seed=seeds_of_tests, size=sizes)
def test_kernel_draws_what_the_reference_draws(device: torch.device, seed: int, size: int) -> None:
    # The logs of the two differ in rounding, so scores within a few ULP could swap; these seeds hold no such pair.
    gen = generator(seed)
    logits = torch.randn(4, size, generator=gen) * 3
    rows = Rows([1.0, 0.0, 0.6, 1.4], [0, 0, 7, 0], [1.0, 1.0, 1.0, 0.9], device, seed)
    cpu = rows.on_cpu()
    picked = reference.pick_tokens(logits, cpu.temperatures, cpu.seeds, cpu.positions)
    sampled = reference.sample_tokens(logits, cpu.temperatures, cpu.top_ks, cpu.top_ps, cpu.seeds, cpu.positions)
    assert rows.pick(strided(logits, device)) == picked.tolist()
    assert rows.sample(strided(logits, device)) == sampled.tolist()


def test_without_a_filter_sampling_is_picking(device: torch.device) -> None:
    size = 777
    logits = torch.randn(6, size, generator=generator(2)).to(device)
    rows = Rows([1.0, 1.0, 0.3, 5.0, 0.0, 1.0], [0, -1, size, 0, 0, size + 1], [1.0, 1.0, 1.0, 2.0, 1.0, 1.0], device)
    assert rows.sample(logits) == rows.pick(logits)
    nearly_all = Rows([1.0] * 2, [size - 1] * 2, [0.9999999] * 2, device)
    assert nearly_all.sample(logits[:2]) == nearly_all.pick(logits[:2])


def test_a_mixed_batch_is_its_rows_alone(device: torch.device) -> None:
    logits = torch.randn(6, 300, generator=generator(8)) * 2
    logits[0, :3] = torch.tensor([9.0, 9.0, 8.0])
    logits[2, 10:40] = -torch.inf
    temperatures, top_ks, top_ps = [0.0, 1.0, 0.6, 0.0, 1.0, 0.9], [0, 0, 0, 0, 3, 40], [1.0, 1.0, 0.9, 0.1, 1.0, 0.8]
    logits = logits.to(device)
    together = Rows(temperatures, top_ks, top_ps, device)
    picked, sampled = together.pick(logits), together.sample(logits)
    assert picked[0] == sampled[0] == 0
    assert picked[3] == sampled[3] == int(logits[3].argmax())
    order = [4, 2, 0, 5, 3, 1]
    for slots in ([0], [2], [5], order):
        some = Rows.__new__(Rows)
        for name, value in vars(together).items():
            setattr(some, name, value[slots])
        assert some.pick(logits[slots]) == [picked[slot] for slot in slots]
        assert some.sample(logits[slots]) == [sampled[slot] for slot in slots]


def test_seed_position_and_nothing_else_decide(device: torch.device) -> None:
    logits = torch.zeros(6, 4000, device=device)
    rows = Rows([1.0] * 6, [0] * 6, [1.0] * 6, device)
    rows.seeds = torch.tensor([[5, 0], [5, 0], [5, 0], [5, 1], [6, 0], [5, -1]], dtype=torch.int32, device=device)
    rows.positions = torch.tensor([9, 9, 10, 9, 9, 9], dtype=torch.int32, device=device)
    first = rows.pick(logits)
    assert first == rows.pick(logits)
    assert first[0] == first[1]
    assert len(set(first)) == 5


def test_tiles_do_not_matter(device: torch.device) -> None:
    logits = (torch.randn(3, 157, generator=generator(5)) * 2).to(device)
    rows = Rows([0.0, 1.0, 0.9], [0, 0, 30], [1.0, 0.9, 0.95], device)
    expected = rows.threshold(logits), rows.sample(logits)
    for tile in (16, 64) if ON_GPU else (64,):
        thresholds = torch.empty(3, device=device)
        for launch in plan_kept_threshold(logits, rows.temperatures, rows.top_ks, rows.top_ps, thresholds, tile=tile):
            launch.run()
        out = torch.empty(3, dtype=torch.int32, device=device)
        for launch in plan_sample_tokens(
            logits, rows.temperatures, rows.top_ks, rows.top_ps, rows.seeds, rows.positions, out, tile=tile
        ):
            launch.run()
        assert torch.equal(thresholds, expected[0])
        assert out.tolist() == expected[1]


@pytest.mark.parametrize("run", ["kernel", "reference"])
def test_the_best_of_all_shards_is_the_token_of_the_whole(device: torch.device, run: str) -> None:
    place = device if run == "kernel" else torch.device("cpu")
    pick, shard, merge = (
        (pick_tokens, pick_from_shard, merge_picks)
        if run == "kernel"
        else (reference.pick_tokens, reference.pick_from_shard, reference.merge_picks)
    )
    logits = torch.randn(7, 101, generator=generator(3)) * 2
    logits[2] = logits[2].round()  # ties within shards and between them
    logits[3] = 1.0
    logits[4, 80] = logits[5, 2] = torch.nan
    logits[6] = -torch.inf
    logits = logits.to(place)
    rows = Rows([1.0, 0.7, 0.0, 0.0, 1.0, 0.0, 1.0], [0] * 7, [1.0] * 7, place)
    parameters = (rows.temperatures, rows.seeds, rows.positions)
    expected = pick(logits, *parameters).tolist()
    assert expected[3:] == [0, -1, -1, 0]
    for length in (36, 52):
        # The last is narrower than the others; columns behind it, which would win, belong to nobody.
        parts = [shard(strided(logits[:, i : i + length], place), *parameters, i) for i in range(0, 101, length)]
        scores, tokens = (torch.stack(values, dim=1) for values in zip(*parts, strict=True))
        assert merge(scores, tokens).tolist() == expected
        best = scores[0].argmax()
        assert tokens[0, best] == expected[0]
        noise = reference.gumbel_noise(rows.seeds[:1].cpu(), rows.positions[:1].cpu(), 101)[0]
        assert scores[0, best].item() == pytest.approx((logits[0].cpu() + noise).max().item(), abs=1e-4)


def test_shards_start_at_multiples_of_four(device: torch.device) -> None:
    rows = Rows([1.0], [0], [1.0], device)
    with pytest.raises(KernelError, match="first_id must be a multiple of 4, not 6"):
        plan_pick_tokens(
            torch.zeros(1, 8, device=device),
            rows.temperatures,
            rows.seeds,
            rows.positions,
            torch.empty(1, dtype=torch.int32, device=device),
            first_id=6,
        )


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    counts = torch.bincount(tokens.cpu().long(), minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    return float(((counts - expected) ** 2 / expected)[probabilities > 0].sum())


@pytest.mark.parametrize(
    ("run", "draws"),
    [("reference", 50_000), ("kernel", 50_000 if ON_GPU else 80)],
)
def test_frequencies(device: torch.device, run: str, draws: int) -> None:
    logits = torch.tensor([1.0, -torch.inf, 0.3, -0.5, 2.0, 1.0, -0.7])
    place = device if run == "kernel" else torch.device("cpu")
    seeds = torch.tensor([[11, 22]], dtype=torch.int32, device=place).expand(draws, -1)
    positions = torch.arange(draws, dtype=torch.int32, device=place)
    temperatures, top_ps = torch.tensor([0.8, 0.95], device=place)[:, None].expand(-1, draws)
    top_ks = torch.tensor(5, dtype=torch.int32, device=place).expand(draws)
    batch = logits.to(place).expand(draws, -1)
    pick, sample = (pick_tokens, sample_tokens) if run == "kernel" else (reference.pick_tokens, reference.sample_tokens)

    probabilities = (logits.double() / 0.8).softmax(0)
    assert chi_square(pick(batch, temperatures, seeds, positions), probabilities) < 20.5  # 5 degrees, 0.1 %
    if run == "kernel" and not ON_GPU:
        return  # filtered draws cost the interpreter much more and add only the threshold, tested above
    probabilities = probabilities * kept_by_sort(logits, 0.8, 5, 0.95)
    probabilities /= probabilities.sum()
    tokens = sample(batch, temperatures, top_ks, top_ps, seeds, positions)
    assert chi_square(tokens, probabilities) < 18.5  # at most 4 degrees, 0.1 %


def test_frequencies_over_a_wide_vocabulary() -> None:
    logits = torch.randn(300, generator=generator(1))
    draws = 20_000
    tokens = reference.pick_tokens(
        logits.expand(draws, -1),
        torch.ones(draws),
        torch.tensor([[1, 2]], dtype=torch.int32).expand(draws, -1),
        torch.arange(draws, dtype=torch.int32),
    )
    # 299 degrees: mean 299, standard deviation 24.5.
    assert abs(chi_square(tokens, logits.double().softmax(0)) - 299) < 3.5 * 24.5


def test_an_empty_batch_gives_no_tokens(device: torch.device) -> None:
    logits = torch.empty(0, 12, device=device)
    rows = Rows([], [], [], device)
    assert rows.pick(logits) == rows.sample(logits) == []


def test_wrong_tensors_are_refused(device: torch.device) -> None:
    logits = torch.zeros(2, 8, device=device)
    rows = Rows([1.0, 1.0], [0, 0], [1.0, 1.0], device)
    with pytest.raises(KernelError, match=r"logits must be \[B, V\]"):
        rows.pick(logits[0])
    with pytest.raises(KernelError, match="float32, float16 or bfloat16"):
        rows.sample(logits.double())
    with pytest.raises(KernelError, match="stride 1"):
        rows.pick(torch.zeros(8, 2, device=device).t())
    with pytest.raises(KernelError, match=r"temperatures must be float32\[3\]"):
        rows.pick(torch.zeros(3, 8, device=device))
    rows.seeds = rows.seeds[:, :1]
    with pytest.raises(KernelError, match=r"seeds must be int32\[2, 2\]"):
        rows.pick(logits)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_a_graph_replays_with_new_logits_and_parameters(device: torch.device) -> None:
    logits = torch.randn(4, LARGE, generator=generator(0)).to(device)
    rows = Rows([0.0, 1.0, 0.7, 1.0], [0, 0, 20, 50], [1.0, 1.0, 1.0, 0.9], device)
    parameters = (rows.temperatures, rows.top_ks, rows.top_ps, rows.seeds, rows.positions)
    sample_tokens(logits, *parameters)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample_tokens(logits, *parameters)
    for step in range(3):
        logits.copy_(torch.randn(4, LARGE, generator=generator(step)))
        rows.positions.add_(1)
        graph.replay()
        assert tokens.tolist() == rows.sample(logits)
