"""Bias, penalties, masks and bad words, against their definitions token by token in float64."""

from __future__ import annotations

import struct

import pytest
import torch
from examples import EXAMPLES, LARGE, ON_GPU, seeds_of_tests, sizes
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.errors import KernelError
from tritonllm.kernels.logit_controls import adjust_logits, plan_adjust_logits
from tritonllm.kernels.reference import logits as reference
from tritonllm.testing.logit_rows import Control, ControlledRows
from tritonllm.testing.sampling_rows import generator, strided


def expected(logits: torch.Tensor, rows: ControlledRows, row: int) -> list[float]:
    """The logits [V] of one row by the definition, in Python's floats; nothing of the op's is used."""
    control = rows.controls[row]
    adjusted = [float(x) for x in logits[row].float().tolist()]
    if control.context_len <= 0:
        return adjusted
    outputs = control.whole_output
    for token, (bias, min_length) in control.biases.items():
        adjusted[token] += bias if control.context_len >= min_length else -float("inf")
    rounded = struct.unpack("3f", struct.pack("3f", *(control.penalties or (1, 0, 0))))
    repetition, presence, frequency = rounded
    for token in {*control.prompt, *outputs} if control.penalties else ():
        adjusted[token] *= 1 / repetition if adjusted[token] > 0 else repetition
    for token in set(outputs) if control.penalties else ():
        adjusted[token] -= presence + frequency * outputs.count(token)
    if control.allowed is not None:
        adjusted = [x if token in control.allowed else -float("inf") for token, x in enumerate(adjusted)]
    for *others, last in control.bad_words:
        if outputs[len(outputs) - len(others) :] == others and len(others) <= len(outputs):
            adjusted[last] = -float("inf")
    return adjusted


def state_of(rows: ControlledRows, device: torch.device) -> list[torch.Tensor]:
    """What `adjust_logits` takes beside logits."""
    parts = (rows.headers, rows.counts, rows.masks, rows.biases, rows.bad_words, rows.recent)
    return [part(device) for part in parts]


@EXAMPLES
@given(seed=seeds_of_tests, size=sizes, data=st.data())
def test_adjusted_logits_are_those_of_the_definition(
    device: torch.device, dtypes: tuple[torch.dtype, ...], seed: int, size: int, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(dtypes))
    rows = ControlledRows.random(seed, batch=4, vocab_size=size)
    logits = strided((torch.randn(4, size, generator=generator(seed)) * 5).to(dtype), device)
    before = logits.clone()
    state = state_of(rows, device)
    adjusted = adjust_logits(logits, *state).cpu()
    assert torch.equal(logits, before)
    for row in range(4):
        wanted = torch.tensor(expected(logits.cpu(), rows, row), dtype=torch.float64)
        torch.testing.assert_close(adjusted[row].double(), wanted, rtol=1e-6, atol=1e-5)
    assert state[1].tolist() == rows.counts_after().tolist()
    assert state[5].tolist() == rows.recent_after().tolist()


@EXAMPLES
@given(seed=seeds_of_tests, size=sizes)
def test_the_kernel_gives_the_bits_of_the_reference(device: torch.device, seed: int, size: int) -> None:
    """So a token with a bias of 0 on the list, which the second kernel writes, is as it was without."""
    rows = ControlledRows.random(seed, batch=3, vocab_size=size)
    logits = strided(torch.randn(3, size, generator=generator(seed)) * 5, device)
    states = state_of(rows, device)
    theirs = [state.cpu().clone() for state in states]
    adjusted = adjust_logits(logits, *states)
    assert torch.equal(adjusted.cpu(), reference.adjust_logits(logits.cpu(), *theirs))
    assert torch.equal(states[1].cpu(), theirs[1])
    assert torch.equal(states[5].cpu(), theirs[5])


def test_rows_without_controls_are_copied(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Also one whose columns hold what its last tenant left there: a row of context length 0."""
    for dtype in dtypes:
        logits = torch.randn(2, LARGE, generator=generator(0)).to(dtype).to(device)
        rows = ControlledRows.random(3, batch=2, vocab_size=LARGE)
        state = state_of(rows, device)
        state[0][0] = 0
        state[0][1, 1] = 0
        before = [part.clone() for part in state]
        adjusted = adjust_logits(logits, *state)
        assert torch.equal(adjusted, logits.float())
        assert all(map(torch.equal, state, before))


def test_nothing_of_a_row_reaches_another(device: torch.device) -> None:
    size = 300
    rows = ControlledRows.random(7, batch=6, vocab_size=size)
    logits = (torch.randn(6, size, generator=generator(7)) * 5).to(device)
    state = state_of(rows, device)
    together = adjust_logits(logits, *(part.clone() for part in state))
    for row in range(6):
        alone = adjust_logits(logits[row : row + 1], *(part[row : row + 1].clone() for part in state))
        assert torch.equal(alone[0], together[row])


def test_nan_stays_and_infinity_follows_the_rules(device: torch.device) -> None:
    rows = ControlledRows.random(1, batch=3, vocab_size=4)
    for control in rows.controls:
        control.context_len, control.penalties, control.allowed = 5, (2.0, 1.0, 1.0), {0}
        control.prompt, control.output, control.newest = [0, 1, 2, 3], [0, 1, 2, 3], 0
        control.biases, control.bad_words = {1: (-float("inf"), 0), 2: (1.0, 9)}, [(1,), (2,)]
    rows.controls[1].allowed = {0, 1, 2, 3}
    values = [[1.0, torch.nan, torch.nan, torch.nan], [torch.inf] * 4, [-torch.inf] * 4]
    logits = torch.tensor(values, device=device)
    state = state_of(rows, device)
    adjusted = adjust_logits(logits, *state)
    inf = float("inf")
    assert adjusted[0].isnan().tolist() == [False, True, True, True]
    assert adjusted[1:].tolist() == [[inf, -inf, -inf, inf], [-inf] * 4]


def test_a_count_ends_at_32767(device: torch.device) -> None:
    rows = ControlledRows.random(2, batch=2, vocab_size=40)
    for control in rows.controls:
        control.context_len, control.penalties, control.newest = 3, (1.0, 0.0, 1.0), 9
        control.biases, control.allowed, control.bad_words = {}, None, []
    counts = rows.counts(device)
    counts[:, 9] = torch.tensor([32766, -2], dtype=torch.int16)  # the second is of the prompt as well
    logits = torch.zeros(2, 40, device=device)
    headers, _, *others = state_of(rows, device)
    for _ in range(3):
        adjusted = adjust_logits(logits, headers, counts, *others)
        assert counts[:, 9].tolist() == [32767, -1]
        assert adjusted[:, 9].tolist() == [-32767.0] * 2


@pytest.mark.parametrize("newest", [-1, -(2**31), 50, 2**31 - 1])
def test_what_is_no_token_is_not_counted(device: torch.device, newest: int) -> None:
    rows = ControlledRows.random(2, batch=1, vocab_size=50)
    rows.controls[0].context_len, rows.controls[0].penalties = 4, (1.0, 1.0, 1.0)
    headers, counts, *others = state_of(rows, device)
    headers[0, 0] = newest
    before = counts.clone()
    adjust_logits(torch.zeros(1, 50, device=device), headers, counts, *others)
    assert torch.equal(counts, before)


def test_the_tile_changes_nothing(device: torch.device) -> None:
    size = 700
    rows = ControlledRows.random(11, batch=2, vocab_size=size)
    logits = torch.randn(2, size, generator=generator(11)).to(device)
    results = []
    for tile in (64, 256, 4096):
        out = torch.empty(2, size, device=device)
        state = state_of(rows, device)
        for launch in plan_adjust_logits(logits, *state, out, tile=tile):
            launch.run()
        results.append((out, state[1]))
    assert all(torch.equal(one, other) for result in results for one, other in zip(result, results[0], strict=True))


def words_alone(bad_words: list[tuple[int, ...]], batch: int = 1) -> ControlledRows:
    """Rows of 5 tokens, 4 of them prompt, that have only words."""
    return ControlledRows([Control(5, 7, [], [], bad_words=bad_words) for _ in range(batch)], 50)


def test_words_are_followed_from_step_to_step(device: torch.device) -> None:
    """As the engine does: the row and the ring stay, and a token is appended; the ring goes around more than once."""
    words = [(3,), (7, 8), (8, 8, 9), (7, 7, 7, 7), (9, 7, 9)]
    rows = words_alone(words)
    state = state_of(rows, device)
    output = []
    for token in [7, 8, 8, 7, 7, 7, 9, 7, 7, 8, 8, 8, 7, 9, 7, 3]:
        output.append(token)
        state[0][0, 0], state[0][0, 1] = token, 4 + len(output)
        adjusted = adjust_logits(torch.zeros(1, 50, device=device), *state)[0]
        forbidden = {word[-1] for word in words if [*word[:-1]] == output[len(output) - len(word) + 1 :]}
        assert {*(adjusted == -torch.inf).nonzero()[:, 0].tolist()} == forbidden
        assert adjusted.isfinite().sum() == 50 - len(forbidden)


def test_words_begin_in_the_output(device: torch.device) -> None:
    """What the ring has from before is not taken for output, and neither is what lies before the sequence."""
    state = state_of(words_alone([(6, 7, 8), (7, 9)], batch=2), device)
    adjusted = adjust_logits(torch.zeros(2, 50, device=device), *state)
    assert (adjusted == -torch.inf).nonzero().tolist() == [[0, 9], [1, 9]]
    state[0][:, 1] = 1
    state[5].fill_(6)
    adjusted = adjust_logits(torch.zeros(2, 50, device=device), *state)
    assert (adjusted == -torch.inf).nonzero().tolist() == [[0, 9], [1, 9]]


def test_whichever_program_comes_last_a_forbidden_token_stays_forbidden(device: torch.device) -> None:
    """Biases and words of the same tokens, in lists of two programs each: one writes what another one forbids."""
    rows = words_alone([(7, token) for token in range(300)])
    rows.controls[0].biases = {token: (1.0, 0) for token in range(300)}
    rows.vocab_size = 301
    assert adjust_logits(torch.zeros(1, 301, device=device), *state_of(rows, device)).tolist() == [
        [-torch.inf] * 300 + [0]
    ]


@pytest.mark.parametrize("num_biases", [0, 1024])
def test_hundreds_of_words_in_one_program_and_in_four(device: torch.device, num_biases: int) -> None:
    words = [(7, token) if token % 2 else (8, token) for token in range(200)]
    rows = words_alone(words, batch=2)
    rows.vocab_size = 300
    headers, counts, masks, _, bad_words, recent = state_of(rows, device)
    biases = torch.zeros(2, num_biases, 3, dtype=torch.int32, device=device)
    headers[1, 0] = 8
    adjusted = adjust_logits(torch.zeros(2, 300, device=device), headers, counts, masks, biases, bad_words, recent)
    forbidden = [{*(row == -torch.inf).nonzero()[:, 0].tolist()} for row in adjusted]
    assert forbidden == [{*range(1, 200, 2)}, {*range(0, 200, 2)}]


@pytest.mark.skipif(not ON_GPU, reason="the interpreter would take minutes")
def test_rows_that_lie_beyond_32_bit_offsets(device: torch.device) -> None:
    """Counts and logits of 151,936 tokens pass 2^31 bytes and, with the stride, 2^31 elements."""
    batch, size = 3, 151936
    logits = torch.zeros(batch, 2**30, dtype=torch.bfloat16, device=device)[:, :size]
    rows = ControlledRows.random(5, batch=batch, vocab_size=size)
    state = state_of(rows, device)
    alone = [part[2:].clone() for part in state]
    assert torch.equal(adjust_logits(logits, *state)[2], adjust_logits(logits[2:].clone(), *alone)[0])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rows", lambda state: state[0][:, :8]),
        ("rows", lambda state: state[0].long()),
        ("counts", lambda state: state[1].int()),
        ("counts", lambda state: state[1][:, :-1]),
        ("masks", lambda state: state[2][:, :1]),
        ("biases", lambda state: state[3][0]),
        ("biases", lambda state: state[3].transpose(1, 2)),
        ("bad_words", lambda state: state[4][:, :, :2]),
        ("bad_words", lambda state: state[4].long()),
        ("recent", lambda state: state[5][:, :3].contiguous()),
        ("recent", lambda state: state[5][0]),
    ],
)
def test_wrong_tensors_are_refused(device: torch.device, name: str, change: object) -> None:
    rows = ControlledRows.random(5, batch=2, vocab_size=70)
    state = state_of(rows, device)
    index = ["rows", "counts", "masks", "biases", "bad_words", "recent"].index(name)
    state[index] = change(state)  # type: ignore[operator]
    with pytest.raises(KernelError, match=f"adjust_logits: {name} must be"):
        adjust_logits(torch.zeros(2, 70, device=device), *state)
