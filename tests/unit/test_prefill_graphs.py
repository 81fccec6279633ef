"""Short prefills are padded to a captured size: padding changes no token and touches no block."""

from __future__ import annotations

import pytest
import torch

from tritonllm import SamplingParams
from tritonllm.engine.inputs import PrefillLayout
from tritonllm.engine.plan import PrefillChunk
from tritonllm.engine.prefill_graphs import MAX_SEQS, TOKEN_BUCKETS, prefill_layouts
from tritonllm.engine.sequence import Choice, RowSampling

PROMPTS = [[2, 3, 4], [9] * 20, [7], [11, 12], [13] * 40, [14], [15] * 17, [16] * 16, [2, 3, 4, 5], [9] * 20 + [1]]
GREEDY = RowSampling(0.0, 0, 1.0, 0)


def params_of(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=index % 2, top_k=9 * (index % 3), max_tokens=6, ignore_eos=True, seed=index)
        for index in range(count)
    ]


@pytest.mark.parametrize("budget", [3, 16, 50, 256])
def test_padded_prefills_give_the_tokens_of_exact_ones(make_engine, budget: int) -> None:
    params = params_of(len(PROMPTS))
    exact = make_engine(max_num_sequences=10, max_num_batched_tokens=budget).generate(PROMPTS, params)
    engine = make_engine(max_num_sequences=10, max_num_batched_tokens=budget)
    runner = engine.runner
    runner.prefill_graphs = runner.make_prefill_graphs(True)
    for _ in range(2):  # the second time over, prefixes are found and buffers are dirty
        assert engine.generate(PROMPTS, params)["token_ids"] == exact["token_ids"]
    if budget >= 16:
        assert len(runner.prefill_graphs.layouts) == sum(size <= budget for size in TOKEN_BUCKETS)


def test_padding_writes_to_no_slot_of_the_pool(make_engine) -> None:
    engine = make_engine()
    runner = engine.runner
    runner.prefill_graphs = runner.make_prefill_graphs(True)
    runner.pool.data.fill_(7.0)
    with torch.inference_mode():
        runner.prefill_graphs.run([PrefillChunk([5, 6, 7], 0, [1], True, GREEDY)])
    untouched = runner.pool.data == 7.0
    assert not untouched[:, :, 1, :3].any()
    untouched[:, :, 1, :3] = True
    assert untouched.all()


def test_a_dirty_buffer_is_padding_again() -> None:
    layout = prefill_layouts(64, 4, 3, 32)[1]
    long = [PrefillChunk(list(range(30)), 5, [1, 2, 3], True, RowSampling(0.5, 3, 0.9, 2**63))]
    short = [PrefillChunk([8], 0, [2], False, GREEDY)]
    buffer = torch.from_numpy(layout.pack(long, 16))
    buffer.copy_(torch.from_numpy(layout.pack(short, 16)))
    inputs = layout.inputs(buffer, choice=Choice.PLAIN)
    assert inputs.attn.slot_mapping.tolist() == [32] + [-1] * 31
    assert inputs.attn.context_lens.tolist() == [1, 0, 0, 0]
    assert inputs.attn.cu_seqlens_q.tolist() == [0, 1, 1, 1, 1]
    assert inputs.input_ids.tolist() == [8] + [0] * 31
    assert inputs.sampling is not None
    assert inputs.sampling.temperatures.tolist() == [0.0] * 4
    assert inputs.attn.tiles[1:, 1].min() >= 32


def test_what_does_not_fit_a_layout_says_so() -> None:
    layout = prefill_layouts(64, 16, 3, 32)[2]
    assert layout.num_tokens == 64
    assert layout.num_seqs == MAX_SEQS

    def needed(*lengths: int, start: int = 0) -> PrefillLayout:
        chunks = [PrefillChunk([1] * length, start, [0] * 40, True, GREEDY) for length in lengths]
        return PrefillLayout.for_chunks(chunks, 16, 32)

    assert layout.holds(needed(64))
    assert layout.holds(needed(*[8] * MAX_SEQS))
    assert not layout.holds(needed(65))
    assert not layout.holds(needed(*[1] * (MAX_SEQS + 1)))
    assert not layout.holds(needed(4, start=16 * 16))
