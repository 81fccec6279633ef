"""Token choice: the kept set against a float64 sort, draws against their distribution, and rows against each other."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.kept_set import kept_threshold, plan_kept_threshold
from tritonllm.kernels.launch import interpreting
from tritonllm.kernels.noise import MIN_TEMPERATURE, gumbel_tile
from tritonllm.kernels.reference import sampling as reference
from tritonllm.kernels.sampling import pick_tokens, plan_pick_tokens, sample_tokens

ON_GPU = not interpreting()
LARGE = 151936 if ON_GPU else 5003  # more than one tile either way
SIZES = (1, 2, 5, 17, 129, 4096, 4099, 50257) if ON_GPU else (1, 2, 5, 17, 129, 4099)
TINY = (0.0, 1e-45, 1e-38, 1e-10, 1e-6, MIN_TEMPERATURE, 1e-4, 1e-2)

sizes = st.sampled_from(SIZES)
seeds_of_tests = st.integers(0, 2**31 - 1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Rows:
    """Parameters of B rows, stored as columns of wider matrices so that nothing is contiguous by chance."""

    def __init__(
        self, temperature: list[float], top_k: list[int], top_p: list[float], device: torch.device, seed: int = 0
    ) -> None:
        batch = len(temperature)
        words = torch.randint(-(2**31), 2**31 - 1, (batch, 9), generator=generator(seed), dtype=torch.int32)
        words[:, 0] = torch.tensor(temperature).view(torch.int32)
        words[:, 3] = torch.tensor(top_p).view(torch.int32)
        words[:, 5] = torch.tensor(top_k, dtype=torch.int32)
        words[:, 8] &= 0x7FFF
        words = words.to(device)
        self.temperatures, self.top_ps = words.view(torch.float32)[:, 0], words.view(torch.float32)[:, 3]
        self.top_ks, self.seeds, self.positions = words[:, 5], words[:, 6:8], words[:, 8]

    def pick(self, logits: torch.Tensor) -> list[int]:
        return pick_tokens(logits, self.temperatures, self.seeds, self.positions).tolist()

    def sample(self, logits: torch.Tensor) -> list[int]:
        parameters = (self.temperatures, self.top_ks, self.top_ps, self.seeds, self.positions)
        return sample_tokens(logits, *parameters).tolist()

    def threshold(self, logits: torch.Tensor) -> torch.Tensor:
        return kept_threshold(logits, self.temperatures, self.top_ks, self.top_ps)

    def on_cpu(self) -> Rows:
        other = Rows.__new__(Rows)
        for name, value in vars(self).items():
            setattr(other, name, value.cpu())
        return other


def strided(logits: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same logits as rows of a wider matrix whose other columns would win."""
    wide = torch.full((logits.shape[0], logits.shape[1] + 3), torch.inf, dtype=logits.dtype, device=device)
    wide[:, : logits.shape[1]] = logits.to(device)
    return wide[:, : logits.shape[1]]


def kept_by_sort(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Kept tokens of one row [V], from the definition and a sort, in float64."""
    x = logits.double().cpu()
    kept = torch.ones_like(x, dtype=torch.bool)
    if 0 < top_k < len(x):
        kept = x >= x.sort(descending=True).values[top_k - 1]
    if top_p < 1:
        ordered = x[kept].sort(descending=True).values
        mass = ((ordered - ordered[0]) / temperature).exp()
        before = mass.cumsum(0) - mass
        # The mass before an element is that before the first of its equals.
        first = torch.searchsorted(-ordered, -ordered)
        stays = before[first] < top_p * mass.sum()
        stays[0] = True
        kept &= x >= ordered[stays].min()
    return kept


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


@triton.jit
def _write_noise_kernel(out_ptr, seeds_ptr, position, first_id, TILE: tl.constexpr):
    noise = gumbel_tile(tl.load(seeds_ptr), tl.load(seeds_ptr + 1), position, first_id, TILE)
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
    _write_noise_kernel[(1,)](out, seeds.to(device), position, first, TILE=tile)
    expected = reference.gumbel_noise(seeds, torch.tensor([position], dtype=torch.int32), first + tile)[0, first:]
    # Two logs, each within 2 ULP of its value, and a log of E has the relative error of E as an absolute one.
    torch.testing.assert_close(out.cpu(), expected, rtol=4e-7, atol=1e-6)


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
    logits = torch.randint(-levels, levels, (3, size), generator=generator(seed)).to(dtype)
    expected = [row.tolist().index(row.max().item()) for row in logits]
    rows = Rows([0.0] * 3, [0, 2, 0], [1.0, 1.0, 0.1], device, seed)
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
        rows = Rows(list(TINY), [2] * len(TINY), [0.9] * len(TINY), device)
        assert rows.sample(logits) == [3] * len(TINY)


def test_below_the_threshold_a_tie_goes_to_the_lowest_id(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]]).expand(8, -1).contiguous().to(device)
    below = Rows([MIN_TEMPERATURE / 2] * 8, [0] * 8, [1.0] * 8, device)
    above = Rows([1e-3] * 8, [0] * 8, [1.0] * 8, device)
    assert below.pick(logits) == [1] * 8
    assert set(above.pick(logits)) == {1, 2, 3}


@pytest.mark.parametrize("place", [0, 700, LARGE - 1])
def test_a_row_with_nan_gives_minus_one_and_harms_no_other(device: torch.device, place: int) -> None:
    logits = torch.randn(5, LARGE, generator=generator(1))
    rows = Rows([0.0, 0.0, 1.0, 1.0, 0.8], [0, 0, 0, 20, 0], [1.0, 1.0, 1.0, 0.9, 0.7], device)
    picked, sampled = rows.pick(logits.to(device)), rows.sample(logits.to(device))
    for row in (1, 3):
        logits[row, place] = torch.nan
        picked[row] = sampled[row] = -1
    assert rows.pick(logits.to(device)) == picked
    assert rows.sample(logits.to(device)) == sampled
    assert rows.threshold(logits.to(device)).isnan().tolist() == [False, True, False, True, False]


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


def test_plus_infinity_wins(device: torch.device) -> None:
    logits = torch.randn(3, 100, generator=generator(0))
    logits[:, 40] = logits[:, 60] = torch.inf
    rows = Rows([0.0, 1.0, 1.0], [0, 0, 5], [1.0, 0.5, 1.0], device)
    assert rows.pick(logits.to(device)) == rows.sample(logits.to(device)) == [40] * 3


def shape_of_distribution(name: str, size: int) -> torch.Tensor:
    shuffled = torch.randperm(size, generator=generator(3))
    if name == "zipf":
        return -(shuffled + 1.0).log()
    if name == "equal":
        return torch.full((size,), 2.5)
    if name == "two-level":
        return torch.where(shuffled < size // 10, 1.0, -2.0)
    if name == "halving":
        return -0.6931471805599453 * shuffled.clamp(max=60).float()
    if name == "normal":
        return torch.randn(size, generator=generator(4)) * 2.5
    if name == "flat":
        return torch.randn(size, generator=generator(5)) * 0.02
    share = float(name)  # one token with this share of the mass
    rest = torch.randn(size, generator=generator(6))
    rest = rest.log_softmax(0) + torch.tensor(1 - share).log()
    rest[size // 3] = torch.tensor(share).log() + rest[size // 3].exp()
    return rest


@pytest.mark.parametrize("name", ["0.41", "0.9", "0.999", "zipf", "equal", "two-level", "halving", "normal", "flat"])
def test_kept_set_is_that_of_a_sort(device: torch.device, dtypes: tuple[torch.dtype, ...], name: str) -> None:
    top_ps = [1e-9, 0.3, 0.9, 0.95, 0.999, 1.0, 0.8, 0.95]
    top_ks = [0, 0, 0, 0, 0, 50, 50, LARGE - 1]
    temperatures = [1.0, 1.0, 0.7, 1.0, 1.3, 1.0, 1.0, 2.0]
    for dtype in dtypes:
        logits = shape_of_distribution(name, LARGE).to(dtype).expand(len(top_ps), -1)
        rows = Rows(temperatures, top_ks, top_ps, device)
        counts = assert_kept(strided(logits, device), rows)
        if name == "equal":
            assert counts == [LARGE] * len(counts)


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
    for row, token in enumerate(rows.sample(logits)):
        assert logits[row, token].item() >= rows.threshold(logits)[row].item()


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


def test_both_zeros_are_equal(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        logits = torch.tensor([[-0.0, -1.0, 0.0, -2.0], [0.0, -1.0, -0.0, -2.0]], dtype=dtype, device=device)
        rows = Rows([1.0, 1.0], [1, 1], [1.0, 0.5], device)
        assert (logits >= rows.threshold(logits)[:, None]).sum(dim=1).tolist() == [2, 2]
        assert Rows([0.0, 0.0], [0, 0], [1.0, 1.0], device).pick(logits) == [0, 0]


@given(seed=seeds_of_tests, size=sizes)
def test_kernel_draws_what_the_reference_draws(device: torch.device, seed: int, size: int) -> None:
    # In float64 logs the two scores of a near-tie could still be ordered either way; no such tie is in these rows.
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
    everything = Rows([1.0] * 6, [size - 1] * 6, [0.9999999] * 6, device)
    assert everything.sample(logits) == everything.pick(logits)


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
    for slots in ([0], [1], [2], [3], [4], [5], order):
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
    logits = (torch.randn(3, 257, generator=generator(5)) * 2).to(device)
    rows = Rows([0.0, 1.0, 0.9], [0, 0, 30], [1.0, 0.9, 0.95], device)
    expected = rows.threshold(logits), rows.sample(logits)
    for tile in (16, 64, 128):
        thresholds = torch.empty(3, device=device)
        for launch in plan_kept_threshold(
            logits, rows.temperatures, rows.top_ks, rows.top_ps, thresholds, tile=max(tile, 64)
        ):
            launch.run()
        out = torch.empty(3, dtype=torch.int32, device=device)
        for launch in plan_pick_tokens(
            logits, rows.temperatures, rows.seeds, rows.positions, thresholds, out, tile=tile
        ):
            launch.run()
        assert torch.equal(thresholds, expected[0])
        assert out.tolist() == expected[1]


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    counts = torch.bincount(tokens.cpu().long(), minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    return float(((counts - expected) ** 2 / expected)[probabilities > 0].sum())


@pytest.mark.parametrize(
    ("run", "draws"),
    [("reference", 100_000), pytest.param("kernel", 100_000 if ON_GPU else 400, id="kernel")],
)
def test_frequencies(device: torch.device, run: str, draws: int) -> None:
    logits = torch.tensor([1.0, -torch.inf, 0.3, -0.5, 2.0, 1.0, -3.0])
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
    logits = torch.randn(1000, generator=generator(1))
    draws = 40_000
    tokens = reference.pick_tokens(
        logits.expand(draws, -1),
        torch.ones(draws),
        torch.tensor([[1, 2]], dtype=torch.int32).expand(draws, -1),
        torch.arange(draws, dtype=torch.int32),
    )
    # 999 degrees: mean 999, standard deviation 45.
    assert abs(chi_square(tokens, logits.double().softmax(0)) - 999) < 3.5 * 45


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
