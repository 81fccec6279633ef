"""The tokens of one request, and the arithmetic of its blocks."""

from __future__ import annotations

import pytest

from tritonllm import SamplingParams, Sequence
from tritonllm.engine.scheduler import Scheduler
from tritonllm.engine.sequence import Choice


@pytest.mark.parametrize("length", range(14))
def test_blocks_cut_the_tokens_without_loss(length: int) -> None:
    seq = Sequence(range(length), block_size=4)
    assert seq.num_blocks == -(-length // 4)
    blocks = [seq.block(index) for index in range(seq.num_blocks)]
    assert sum(blocks, []) == list(range(length))
    assert all(len(block) == 4 for block in blocks[:-1])
    # Not the remainder: a full last block holds block_size tokens, and there is no slice from minus zero.
    assert seq.last_block_num_tokens == (len(blocks[-1]) if blocks else 0)


def test_only_appending_changes_it_and_never_the_prompt() -> None:
    prompt = [1, 2, 3]
    seq = Sequence(prompt)
    for token in (7, 8):
        seq.append_token(token)
    prompt.append(99)
    assert (len(seq), seq.num_prompt_tokens, seq.num_completion_tokens) == (5, 3, 2)
    assert (seq.token_ids, seq.completion_token_ids) == ([1, 2, 3, 7, 8], [7, 8])


def test_length_counts_tokens_on_their_way() -> None:
    seq = Sequence([1, 2, 3])
    seq.num_unread_tokens = 1
    assert (len(seq), seq.length) == (3, 4)


def test_ids_are_unique() -> None:
    assert len({Sequence([1]).seq_id for _ in range(100)}) == 100


def test_the_request_s_seed_counts_before_the_given_one() -> None:
    assert Sequence([1], SamplingParams(seed=5), seed=9).sampling.seed == 5
    assert Sequence([1], SamplingParams(seed=0), seed=9).sampling.seed == 0
    assert Sequence([1], SamplingParams(), seed=9).sampling.seed == 9


@pytest.mark.parametrize(
    ("params", "choice"),
    [
        ({"temperature": 0, "top_p": 0.5, "top_k": 3}, Choice.PLAIN),
        ({"temperature": 1}, Choice.PLAIN),
        ({"temperature": 1, "repetition_penalty": 1, "presence_penalty": 0, "logit_bias": {}}, Choice.PLAIN),
        ({"temperature": 1, "top_p": 0.5}, Choice.FILTERED),
        ({"temperature": 1, "top_k": 3}, Choice.FILTERED),
        ({"temperature": 1, "min_p": 0.1}, Choice.CONTROLLED),
        ({"temperature": 0, "repetition_penalty": 1.1}, Choice.CONTROLLED),
        ({"temperature": 0, "presence_penalty": 0.1}, Choice.CONTROLLED),
        ({"temperature": 0, "frequency_penalty": -0.1}, Choice.CONTROLLED),
        ({"temperature": 0, "logit_bias": {3: 1}}, Choice.CONTROLLED),
        ({"temperature": 0, "allowed_token_ids": [3]}, Choice.CONTROLLED),
        ({"temperature": 0, "min_tokens": 1}, Choice.CONTROLLED),
        ({"temperature": 0, "min_p": 0.1, "logprobs": 0}, Choice.REPORTED),
    ],
)
def test_what_choosing_a_token_takes(params, choice: Choice) -> None:
    scheduler = Scheduler(1, 8, 8, 8, eos=2)
    seq = Sequence([1], SamplingParams(**params))
    scheduler.add_sequence(seq)
    assert seq.sampling.choice is choice
    assert seq.sampling.choice.end is min(choice, Choice.CONTROLLED)
