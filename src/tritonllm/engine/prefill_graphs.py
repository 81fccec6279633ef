"""Short prefills, captured: the host would need longer to launch their kernels than the device to run them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tritonllm.engine.cuda_graphs import capture
from tritonllm.engine.inputs import PrefillLayout, StepInputs, chunk_inputs
from tritonllm.engine.plan import PrefillChunk, choice_of_chunks
from tritonllm.engine.sequence import Choice
from tritonllm.engine.upload import on_host, to_device
from tritonllm.kernels.prefill_tiling import PrefillTiling

TOKEN_BUCKETS = (16, 32, 64, 128, 256, 512)
MAX_SEQS = 8
MAX_TABLE_WIDTH = 256

# Prompts with controls come with state of their own, which lies elsewhere each time.
_CAPTURED = (Choice.FILTERED, Choice.PLAIN)


def prefill_layouts(max_tokens: int, max_seqs: int, table_width: int, tile_rows: int) -> list[PrefillLayout]:
    """Layouts worth capturing under these limits, smallest first, in tiles of the form that runs everywhere."""
    seqs = min(max_seqs, MAX_SEQS)
    width = min(-(-table_width // 16) * 16, MAX_TABLE_WIDTH)
    return [
        PrefillLayout(tokens, seqs, width, -(-tokens // tile_rows) + seqs, seqs, tile_rows)
        for tokens in TOKEN_BUCKETS
        if tokens <= max_tokens
    ]


class PrefillGraphs:
    """Runs prompt chunks in the smallest layout that holds them, or in one of their own.

    A layout's inputs lie in a static buffer, padded, so one upload and one replay are all that a short prefill costs.
    Where nothing was captured, the same padded call is made; without layouts nothing is padded.

    Args:
        forward: runs a prefill on the inputs given.
        layouts: smallest first.
        block_size: tokens a cache block holds.
        tiling: says how chunks that fit no layout are cut into tiles.
        device: where the inputs lie.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs], None],
        layouts: list[PrefillLayout],
        block_size: int,
        tiling: PrefillTiling,
        device: torch.device,
    ) -> None:
        self.forward = forward
        self.layouts = layouts
        self.block_size = block_size
        self.tiling = tiling
        self.device = device
        self._buffers = [to_device(layout.pack([], block_size), device) for layout in layouts]
        self._graphs: dict[tuple[int, Choice], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # torch's handle of the memory that all graphs share

    def capture(self) -> None:
        """Capture every layout in both ways, largest first, on buffers that hold padding alone."""
        for index in reversed(range(len(self.layouts))):
            for choice in _CAPTURED:
                graph = capture(self._call(index, choice), self._pool)
                self._pool = self._pool or graph.pool()
                self._graphs[index, choice] = graph

    def run_every_layout(self) -> None:
        """Run every layout in both ways, on buffers that hold padding alone, without capturing."""
        for index in range(len(self.layouts)):
            for choice in _CAPTURED:
                self._call(index, choice)()

    def layout_of(self, chunks: list[PrefillChunk]) -> int | None:
        """Which layout holds prompt chunks, at least one; None if they run in one of their own."""
        if choice_of_chunks(chunks) not in _CAPTURED or any(chunk.next_token_ids for chunk in chunks):
            return None
        needed = PrefillLayout.for_chunks(chunks, self.block_size, self.tiling.portable_rows)
        return next((i for i, layout in enumerate(self.layouts) if layout.holds(needed)), None)

    def run(self, chunks: list[PrefillChunk]) -> None:
        """Run prompt chunks, at least one."""
        index, choice = self.layout_of(chunks), choice_of_chunks(chunks)
        if index is None:
            self.forward(chunk_inputs(chunks, self.block_size, self.tiling, self.device))
            return
        packed = on_host(self.layouts[index].pack(chunks, self.block_size), self.device)
        self._buffers[index].copy_(packed, non_blocking=True)
        graph = self._graphs.get((index, choice))
        if graph is None:
            self._call(index, choice)()
        else:
            graph.replay()

    def reset(self) -> None:
        """Drop every graph and the memory behind them."""
        self._graphs.clear()
        self._pool = None

    def _call(self, index: int, choice: Choice) -> Callable[[], None]:
        return partial(self.forward, self.layouts[index].inputs(self._buffers[index], choice))
