"""What a start runs so that nothing compiles, and memory is measured, before the first request."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tritonllm.config import EngineConfig
from tritonllm.engine.controls import RowControls, Seen
from tritonllm.engine.device_steps import DeviceSteps
from tritonllm.engine.inputs import prefill_inputs
from tritonllm.engine.plan import PrefillChunk
from tritonllm.engine.sequence import Choice, RowSampling
from tritonllm.kernels.decode_attention import DecodeWorkspace
from tritonllm.kernels.decode_splits import distinct_batches
from tritonllm.kernels.prefill_tiling import PrefillTiling


def take_product_workspace(device: torch.device) -> None:
    """Have PyTorch allocate the workspace of its matrix products on a GPU, which it keeps for the life of the process.

    Called before anything large is loaded, so that it gets memory of its own. Else it gets a part of what loading
    leaves to the allocator, which then cannot give the whole of that back, neither to the KV pool nor after `exit`.
    """
    if device.type == "cuda":
        ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(ones, ones)


def warm_up_prefills(
    config: EngineConfig, tiling: PrefillTiling, heads: tuple[int, int], num_sms: int, mixed: bool
) -> Iterator[tuple[list[PrefillChunk], int, int]]:
    """Prompt chunks of one step each, with the rows of their tiles: plain, filtered and with controls.

    The largest are `max(1, max_num_batch_tokens // max_model_length)` sequences, cut to the budget. Before them come
    prompts of one token, as many at once as make every difference to a kernel. The last number is that of the decode
    rows in the same pass, 0 but for as many of one token as make a difference to their attention.

    Args:
        mixed: whether there are passes with decode rows.
        heads, num_sms: KV heads of this rank, their size, and multiprocessors, as the decode attention of last tokens
            knows them.
    """
    length = min(config.max_model_length or 1, config.max_num_batched_tokens)
    budget = min(config.warm_up_tokens, config.max_num_batched_tokens)
    max_num_rows = config.max_num_sequences
    count = min(max(1, config.warm_up_tokens // length), max(1, budget // length), max_num_rows)
    table = [0] * (-(-length // config.block_size))
    # Rows that decode, and prompts that end, in one step at most.
    batches = distinct_batches(min(max_num_rows, config.max_num_batched_tokens), *heads, num_sms)
    if mixed:
        for num_rows in batches:
            yield [PrefillChunk([0], 0, table, True, RowSampling(1.0, 0, 1.0, 0))], tiling.portable_rows, num_rows
    sizes = [(1, 1, tile_rows) for tile_rows in tiling.all_rows]
    sizes += [(1, batch, tiling.portable_rows) for batch in batches]
    sizes.append((length, count, tiling.rows([length] * count)))
    controls = RowControls(0.1, 2.0, 0.0, 0.0, ((0, 0.0, 0),), (0,), 0)
    for sampling in (RowSampling(1.0, 0, 1.0, 0), RowSampling(1.0, 2, 0.5, 0), RowSampling(1.0, 2, 0.5, 0, controls)):
        for chunk_length, chunk_count, tile_rows in sizes:
            seen: Seen | None = None if sampling.controls is None else ([0], [])
            following = (0,) * (0 if seen is None else chunk_length)
            chunk = PrefillChunk([0] * chunk_length, 0, table, True, sampling, seen, following)
            yield [chunk] * chunk_count, tile_rows, 0


def run_small_and_largest(
    steps: DeviceSteps,
    config: EngineConfig,
    tiling: PrefillTiling,
    heads: tuple[int, int],
    workspace: DecodeWorkspace,
    device: torch.device,
) -> None:
    """Run these prompts so that they write nothing."""
    sizes = heads, workspace.num_sms, steps.mixed.possible
    for chunks, tile_rows, num_rows in warm_up_prefills(config, tiling, *sizes):
        inputs = prefill_inputs(chunks, config.block_size, tile_rows, device, num_rows)
        inputs.attn.slot_mapping.fill_(-1)
        if num_rows:
            steps.decode_and_prefill(num_rows, Choice.PLAIN, inputs)
        else:
            steps.prefill(inputs)
