"""Every batch has a bucket, padding stays padding, and a replay is the very same step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tritonllm import SamplingParams
from tritonllm.engine.cuda_graphs import DecodeGraphs, bucket_sizes
from tritonllm.engine.device_steps import CAPTURED, Part
from tritonllm.engine.sequence import Choice
from tritonllm.errors import EngineError
from tritonllm.kernels.decode_rows import CONTEXT_LEN, HEADER

PROMPTS = [[2, 3, 4], [9] * 20, [7], [11, 12], [13] * 40, [14], [15] * 17, [16] * 16]
LENGTHS = [5, 9, 17, 33, 2, 30, 11, 26]
CONTROLS = [
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {7: 3.0, 9: -50.0}, "logprobs": 2},
    {"allowed_token_ids": [3, 5, 8], "presence_penalty": 0.5},
]


class GraphDouble:
    """Stands for a captured graph: a replay runs the step again, with sizes and tensors as they were at capture."""

    def __init__(self, runner, size: int, part: Part) -> None:
        self.runner, self.size, self.part = runner, size, part
        self.addresses = self.static_addresses()
        self.replays = 0

    def static_addresses(self) -> list[int]:
        runner = self.runner
        tensors = [runner.rows, runner.sampled, runner.results.reports, runner.pool.data]
        tensors += [*vars(runner.workspace).values(), *vars(runner.controls).values()]
        tensors += [*runner.model.parameters(), runner._steps.hidden]
        return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]

    def replay(self) -> None:
        assert self.static_addresses() == self.addresses, "a replay would read memory that is no longer in use"
        self.replays += 1
        self.runner._steps.decode(self.size, self.part)


def with_doubles(engine) -> dict[tuple[int, Part], GraphDouble]:
    graphs = engine.runner.graphs
    with torch.inference_mode():
        engine.runner._decode_every_size()  # as before a capture
    doubles = {(size, part): GraphDouble(engine.runner, size, part) for size in graphs.buckets for part in CAPTURED}
    graphs._graphs.update(doubles)
    graphs.forward = None  # every step must find a graph
    return doubles


@pytest.mark.parametrize("limit", [*range(1, 70), 96, 97, 100, 255, 256, 257, 520])
def test_every_batch_has_a_bucket_and_the_limit_is_one(limit: int) -> None:
    graphs = DecodeGraphs(lambda rows, part: None, limit)
    assert graphs.buckets[-1] == limit
    assert graphs.buckets == sorted(set(graphs.buckets))
    for rows in range(1, limit + 1):
        bucket = graphs.bucket(rows)
        assert rows <= bucket <= limit
        assert bucket <= max(2 * rows - 1, rows + 15)


def test_buckets_are_the_documented_ones() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(16) == [1, 2, 4, 8, 16]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 32, 48, 64]


def test_without_a_graph_the_step_is_called_at_its_padded_size() -> None:
    calls = []
    graphs = DecodeGraphs(lambda rows, part: calls.append((rows, part)), 12)
    for rows in (1, 3, 8, 9, 12):
        graphs.run(rows, Choice.PLAIN)
    graphs.run(2, Choice.REPORTED)
    graphs.run(2, Choice.FILTERED)
    plain = [(size, Part.PLAIN) for size in (1, 4, 8, 12, 12)]
    assert calls == [*plain, (2, Part.FORWARD), (2, Part.CONTROLLED_END), (2, Part.FILTERED)]


def test_an_end_without_a_forward_pass_is_refused(make_engine) -> None:
    steps = make_engine(max_num_sequences=2).runner._steps
    with torch.inference_mode(), pytest.raises(EngineError, match="plain end of a step has no forward pass before it"):
        steps.decode(1, Part.PLAIN_END)


@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize("limit", [3, 8])
def test_replayed_steps_give_the_tokens_of_eager_ones(make_engine, limit: int, controlled: bool) -> None:
    filtered = (9, 30) if controlled else (5, 9, 17, 2, 11)
    params = [
        SamplingParams(temperature=index % 2, top_k=9 * (n in filtered), max_tokens=n, ignore_eos=True, seed=index)
        for index, n in enumerate(LENGTHS)
    ]
    if controlled:
        params = [
            replace(param, **CONTROLS[index % len(CONTROLS)]) if LENGTHS[index] in (5, 17, 2) else param
            for index, param in enumerate(params)
        ]
    eager = make_engine(max_num_sequences=limit, enforce_eager=True).generate(PROMPTS, params)
    engine = make_engine(max_num_sequences=limit)
    doubles = with_doubles(engine)
    assert engine.generate(PROMPTS, params) == eager
    used = {key for key, double in doubles.items() if double.replays}
    assert {size for size, _ in used} == set(engine.runner.graphs.buckets)
    assert {part for _, part in used} == ({*CAPTURED} if controlled else {Part.FILTERED, Part.PLAIN})


def test_padding_writes_no_block_and_its_state_stays_empty(make_engine) -> None:
    engine = make_engine(max_num_sequences=8, max_num_batched_tokens=256)
    runner = engine.runner
    forward = runner.graphs.forward
    sizes = []

    def checked(size: int, part: Part) -> None:
        rows = runner.rows[:size].clone()
        before = runner.pool.data.clone()
        forward(size, part)
        live = rows[:, CONTEXT_LEN] > 0
        sizes.append((int(live.sum()), size))
        assert not runner.rows[:size][~live, CONTEXT_LEN].any()
        changed = (runner.pool.data != before).flatten(4).any(-1).any(0).any(0)  # [blocks, block_size]
        expected = torch.zeros_like(changed)
        for row in rows[live]:
            position = int(row[CONTEXT_LEN]) - 1
            expected[row[HEADER + position // 16], position % 16] = True
        assert torch.equal(changed, expected)

    runner.graphs.forward = checked
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in LENGTHS]
    engine.generate(PROMPTS, params)
    assert any(live < size for live, size in sizes)
    assert {live for live, _ in sizes} >= {1, 3, 5, 7, 8}
