"""Log probabilities against a softmax in float64, and the order of the likeliest tokens against a sort."""

from __future__ import annotations

import pytest
import torch
from examples import EXAMPLES, LARGE, seeds_of_tests, sizes
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.logprobs import MAX_TOP, plan_token_logprobs, token_logprobs
from tritonllm.testing.sampling_rows import DISTRIBUTIONS, generator, logits_row, strided


def column(values: list[int], device: torch.device) -> torch.Tensor:
    """int32 [B], every third word of a longer row."""
    return torch.tensor([[value, -7, 2**30] for value in values], dtype=torch.int32, device=device)[:, 0]


def assert_right(
    logits: torch.Tensor, tokens: list[int], num_top: int, result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """By the definition: a softmax in float64, and a sort that keeps equal logits in the order of their ids."""
    logprobs, ids, ranks = (part.cpu() for part in result)
    x = logits.double().cpu()
    exact = x.log_softmax(dim=1)
    for row, token in enumerate(tokens):
        order = x[row].sort(descending=True, stable=True).indices[:num_top].tolist()
        assert ids[row].tolist() == [token, *order]
        torch.testing.assert_close(logprobs[row].double(), exact[row, [token, *order]], rtol=2e-6, atol=4e-6)
        assert ranks[row] == 1 + (x[row] > x[row, token]).sum()


@EXAMPLES
@given(seed=seeds_of_tests, size=sizes, data=st.data())
def test_logprobs_are_those_of_a_softmax(
    device: torch.device, dtypes: tuple[torch.dtype, ...], seed: int, size: int, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(dtypes))
    num_top = data.draw(st.sampled_from([top for top in (0, 1, 5, 20) if top <= size]))
    gen = generator(seed)
    logits = torch.randn(3, size, generator=gen) * data.draw(st.sampled_from((0.01, 3.0, 30.0)))
    if data.draw(st.booleans()):
        logits = logits.round()  # ties, and zeros of both signs
    logits = strided(logits.to(dtype), device)
    tokens = torch.randint(size, (3,), generator=gen).tolist()
    result = token_logprobs(logits, column(tokens, device), column([1, 5, 2], device), num_top)
    assert_right(logits, tokens, num_top, result)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_logprobs_of_every_distribution(device: torch.device, name: str | float) -> None:
    logits = logits_row(name, LARGE)[None].to(device)
    best = int(logits.argmax())
    assert_right(logits, [best], 20, token_logprobs(logits, column([best], device), column([1], device), 20))


def test_rows_left_out_say_so_and_harm_no_other(device: torch.device) -> None:
    logits = torch.randn(4, LARGE, generator=generator(0)).to(device)
    tokens, wanted = column([3, 4, 5, -1], device), column([1, 0, -9, 1], device)
    logprobs, ids, ranks = token_logprobs(logits, tokens, wanted, 3)
    assert ids[1:3].tolist() == [[-1] * 4] * 2
    assert ranks.tolist()[1:] == [0, 0, 0]
    assert logprobs.isnan().tolist() == [[False] * 4, [True] * 4, [True] * 4, [True, False, False, False]]
    assert ids[3, 0] == -1
    alone = token_logprobs(logits[:1].clone(), column([3], device), column([1], device), 3)
    assert torch.equal(alone[0][0], logprobs[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy on inf - inf
def test_a_softmax_that_does_not_exist_is_nan(device: torch.device) -> None:
    logits = torch.randn(4, 100, generator=generator(0))
    logits[0, 50] = torch.nan
    logits[1, 60] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits = logits.to(device)
    logprobs, ids, _ = token_logprobs(logits, column([0, 0, 0, 0], device), column([1] * 4, device), 2)
    assert bool(logprobs[:3].isnan().all())
    assert logprobs[3].tolist() == [0.0, 0.0, -torch.inf]
    assert ids[3].tolist() == [0, 0, 1]


def test_the_tile_changes_neither_order_nor_rank(device: torch.device) -> None:
    logits = torch.randn(2, 700, generator=generator(3)).round(decimals=1).to(device)
    tokens, wanted = column([5, 699], device), column([1, 1], device)
    for tile in (64, 256, 4096):
        logprobs = torch.empty(2, 8, device=device)
        ids = torch.empty(2, 8, dtype=torch.int32, device=device)
        ranks = torch.empty(2, dtype=torch.int32, device=device)
        for launch in plan_token_logprobs(logits, tokens, wanted, logprobs, ids, ranks, tile=tile):
            launch.run()
        assert_right(logits, [5, 699], 7, (logprobs, ids, ranks))


@pytest.mark.parametrize(("size", "num_top"), [(50, -1), (50, MAX_TOP + 1), (3, 4)])
def test_too_many_tokens_are_refused(device: torch.device, size: int, num_top: int) -> None:
    with pytest.raises(KernelError, match="num_top must be"):
        token_logprobs(torch.zeros(1, size, device=device), column([0], device), column([1], device), num_top)
