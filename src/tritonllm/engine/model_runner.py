"""The device side of a step: upload what changed, run the model, sample, advance. No host sync in between.

Every line here runs for every token. Think twice before adding one.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from tritonllm.config import EngineConfig
from tritonllm.engine.cuda_graphs import DecodeGraphs
from tritonllm.engine.inputs import SamplingRows, StepInputs, decode_inputs, pack_row, prefill_inputs
from tritonllm.engine.kv_cache import KVPool, blocks_on_cpu, blocks_on_gpu, bytes_per_block
from tritonllm.engine.plan import PrefillChunk, StepPlan, plan_of, prefill_chunk, row_update
from tritonllm.engine.prefill_graphs import PrefillGraphs, prefill_layouts
from tritonllm.engine.resolve import ResolvedModel, build_model, resolve_model
from tritonllm.engine.sequence import RowSampling, Sequence
from tritonllm.engine.upload import upload
from tritonllm.errors import EngineError
from tritonllm.kernels.decode_attention import DecodeWorkspace, distinct_batches
from tritonllm.kernels.decode_rows import CONTEXT_LEN, HEADER, TOKEN, advance_rows, load_rows
from tritonllm.kernels.launch import compiling_ahead
from tritonllm.kernels.longest_first import FEW_ROWS, longest_first
from tritonllm.kernels.prefill_attention import PrefillTiling
from tritonllm.kernels.sampling import pick_tokens, sample_tokens
from tritonllm.models.attention_metadata import DecodeMetadata
from tritonllm.models.decoder import DecoderLM
from tritonllm.models.layers import LMHead
from tritonllm.models.tensor_parallel import TPGroup


class ModelRunner:
    """Holds the model, the KV pool and the decode rows of one rank, and executes step plans.

    `launch(plan)` queues a step on the device and returns; `collect()` waits for the oldest launched step and returns
    its tokens. `run(seqs, is_prefill)` does both for sequences that the caller scheduled.

    Args:
        config: the engine's configuration.
        rank: this process among the tensor-parallel ranks.
        event: signals of the other ranks; None in a world of one.
        resolved: what `config` was resolved to, if the caller has done that.
    """

    def __init__(
        self, config: EngineConfig, rank: int = 0, event: Any = None, *, resolved: ResolvedModel | None = None
    ) -> None:
        self.resolved = resolved if resolved is not None else resolve_model(config)
        self.config = self.resolved.engine
        self.rank = rank
        self.device = self.resolved.device
        self.dtype = getattr(torch, self.config.dtype)
        self.max_num_rows = self.config.max_num_sequences
        self.block_size = self.config.block_size
        tp = TPGroup(rank, self.config.world_size)
        model = self.resolved.config
        heads = model.num_heads // tp.size
        self.tiling = PrefillTiling.choose(heads, model.head_dim, self.dtype, self.block_size, self.device)
        with torch.inference_mode():
            self.model = build_model(self.resolved, tp)
            self._make_state(tp)
        self._thread = threading.local()
        self._unread: deque[tuple[torch.Tensor, Any, StepPlan]] = deque()
        self.graphs = DecodeGraphs(self._decode, self.max_num_rows)
        self.prefill_graphs = self.make_prefill_graphs(self.device.type != "cpu" and not self.config.enforce_eager)
        self.num_blocks = 0
        self._make_pool()

    def _make_state(self, tp: TPGroup) -> None:
        model = self.resolved.config
        self.num_kv_heads = tp.split_kv_heads(model.num_kv_heads)[1]
        table_width = -(-(self.config.max_model_length or 1) // self.block_size)
        width = -(-(HEADER + table_width) // 16) * 16
        self._block_bytes = bytes_per_block(model, self.block_size, self.num_kv_heads, self.dtype)
        self.rows = torch.zeros(self.max_num_rows, width, dtype=torch.int32, device=self.device)
        self.sampled = torch.zeros(2 * self.max_num_rows, dtype=torch.int32, device=self.device)
        self.workspace = DecodeWorkspace.allocate(
            self.max_num_rows, model.num_heads // tp.size, self.num_kv_heads, model.head_dim, self.device
        )
        # With a compute_logits of its own a model decides what a logit is, so its head is not bypassed.
        self._head: LMHead | None = None
        if isinstance(self.model, DecoderLM) and type(self.model).compute_logits is DecoderLM.compute_logits:
            self._head = self.model.lm_head

    # ---- start-up ----

    def _size_by_measuring(self) -> None:
        with torch.inference_mode(), torch.cuda.device(self.device):
            self.pool = self._new_pool(2)
            self._compile_ahead()
            activations = self.warmup_model()
            before = torch.cuda.mem_get_info()[0]
            if not self.config.enforce_eager:
                self.graphs.capture([self.max_num_rows])
                self.prefill_graphs.capture()
            torch.cuda.synchronize()
            graphs = max(before - torch.cuda.mem_get_info()[0], 0)
            self.graphs.reset()
            self.prefill_graphs.reset()
            torch.cuda.empty_cache()
            self.allocate_kv_cache(activations, graphs)
            if self.config.enforce_eager:
                self._decode_every_size()
            else:
                self.capture_cudagraph()

    def _make_pool(self) -> None:
        if self.device.type == "cuda":
            self._size_by_measuring()
            return
        wanted = self.max_num_rows * (-(-(self.config.max_model_length or 1) // self.block_size))
        self.num_blocks = self.config.max_cached_blocks or blocks_on_cpu(wanted, self._block_bytes)
        self.pool = self._new_pool(self.num_blocks)

    def _compile_ahead(self) -> None:
        """Compile side by side what the rest of the start would compile one by one."""
        vocab_size = self.resolved.config.vocab_size
        longest_first(load_rows(self.rows, self.max_num_rows, self.block_size, vocab_size)[3])  # looked up by, so made
        with compiling_ahead():
            self._decode_every_size()
            self._prefill_every_kernel()

    def _decode_every_size(self) -> None:
        for size in self.graphs.buckets:
            for plain in (False, True):
                self._decode(size, plain)

    def warmup_model(self) -> int:
        """Run the largest prefill on the pool at hand, which compiles its kernels; returns the bytes it needed.

        `max(1, max_num_batch_tokens // max_model_length)` sequences, cut to the budget, that write nothing. Before it
        run prompts of one token, as many at once as make every difference to a kernel.
        """
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._prefill_every_kernel()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def _prefill_every_kernel(self) -> None:
        length = min(self.config.max_model_length or 1, self.config.max_num_batched_tokens)
        budget = min(self.config.warm_up_tokens, self.config.max_num_batched_tokens)
        count = min(max(1, self.config.warm_up_tokens // length), max(1, budget // length), self.max_num_rows)
        table = [0] * (-(-length // self.block_size))
        sizes = [(1, 1, tile_rows) for tile_rows in self.tiling.all_rows]
        most = min(self.max_num_rows, self.config.max_num_batched_tokens)  # prompts that can end in one step
        batches = distinct_batches(most, self.num_kv_heads, self.workspace.num_sms)
        sizes += [(1, batch, self.tiling.portable_rows) for batch in batches]
        sizes.append((length, count, self.tiling.rows([length] * count)))
        for sampling in (RowSampling(1.0, 0, 1.0, 0), RowSampling(1.0, 2, 0.5, 0)):
            for chunk_length, chunk_count, tile_rows in sizes:
                chunk = PrefillChunk([0] * chunk_length, 0, table, True, sampling)
                inputs = prefill_inputs([chunk] * chunk_count, self.block_size, tile_rows, self.device)
                inputs.attn.slot_mapping.fill_(-1)
                self._prefill(inputs)

    def allocate_kv_cache(self, activations: int = 0, graphs: int = 0) -> None:
        """Replace the pool by one as large as device memory allows, given the bytes that other things need."""
        del self.pool
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        fitting = blocks_on_gpu(free, self.config.gpu_memory_utilization, activations, graphs, self._block_bytes)
        self.num_blocks = min(fitting, self.config.max_cached_blocks or fitting)
        self.pool = self._new_pool(self.num_blocks)

    def capture_cudagraph(self) -> None:
        """Capture the decode step of every bucket, and short prefills."""
        self.graphs.capture()
        self.prefill_graphs.capture()

    def make_prefill_graphs(self, padded: bool) -> PrefillGraphs:
        """What runs prompt chunks: short ones padded to a few sizes that can be captured, or each as it is."""
        layouts = []
        if padded:
            table_width = self.rows.shape[1] - HEADER
            budget = self.config.max_num_batched_tokens
            layouts = prefill_layouts(budget, self.max_num_rows, table_width, self.tiling.portable_rows)
        return PrefillGraphs(self._prefill, layouts, self.block_size, self.tiling, self.device)

    def _new_pool(self, num_blocks: int) -> KVPool:
        return KVPool(self.resolved.config, num_blocks, self.block_size, self.num_kv_heads, self.dtype, self.device)

    # ---- one step ----

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Queue a step: changed rows, then the decode rows, then the prompt chunks."""
        self._apply_changes(plan)
        if plan.num_decode_rows:
            self.graphs.run(plan.num_decode_rows, plan.plain_decode)
        if plan.chunks:
            self.prefill_graphs.run(plan.chunks)
        on_gpu = self.device.type == "cuda"
        host = torch.empty_like(self.sampled, device="cpu", pin_memory=on_gpu)
        host.copy_(self.sampled, non_blocking=True)
        done = torch.cuda.Event() if on_gpu else None
        if done is not None:
            done.record()
        self._unread.append((host, done, plan))

    def collect(self) -> list[int]:
        """Wait for the oldest launched step: one token for each decode row, then one for each chunk that samples.

        Raises:
            EngineError: every launched step has been collected.
        """
        if not self._unread:
            raise EngineError("collect() was called without a launched step; call launch(plan) first")
        host, done, plan = self._unread.popleft()
        if done is not None:
            done.synchronize()
        num_sampled = sum(chunk.sample for chunk in plan.chunks)
        tokens = host.tolist()
        return tokens[: plan.num_decode_rows] + tokens[self.max_num_rows : self.max_num_rows + num_sampled]

    def _apply_changes(self, plan: StepPlan) -> None:
        """Write the rows that changed; host and device work grow with the changes, not with the batch."""
        if plan.zero_blocks:
            self.pool.zero(torch.tensor(plan.zero_blocks, device=self.device))
        width = self.rows.shape[1]
        cells = [(row * width + CONTEXT_LEN, 0) for row in plan.cleared_rows]
        cells += [(row * width + HEADER + index, block_id) for row, index, block_id in plan.new_blocks]
        updates = plan.row_updates
        if not cells and not updates:
            return
        used = HEADER + max((len(update.block_table) for update in updates), default=0)
        packed = [value for update in updates for value in pack_row(update, used)]
        where, what, rows, sources, matrix = upload(
            [
                [cell for cell, _ in cells],
                [value for _, value in cells],
                [update.row for update in updates],
                [update.token_source for update in updates],
                packed,
            ],
            self.device,
        )
        if cells:
            self.rows.view(-1).index_copy_(0, where.long(), what)
        if updates:
            matrix = matrix.view(len(updates), used)
            on_device = self.sampled[sources.clamp(min=0).long()]
            matrix[:, TOKEN] = torch.where(sources >= 0, on_device, matrix[:, TOKEN])
            self.rows[:, :used].index_copy_(0, rows.long(), matrix)

    def _decode(self, num_rows: int, plain: bool) -> None:
        """One decode step of the first rows, from last tokens to next tokens; this is what a graph captures."""
        rows = self.rows[:num_rows]
        input_ids, positions, slots, context_lens = load_rows(
            self.rows, num_rows, self.block_size, self.resolved.config.vocab_size
        )
        order = longest_first(context_lens) if num_rows > FEW_ROWS else None
        attn = DecodeMetadata(slots, rows[:, HEADER:], context_lens, self.workspace, order)
        hidden = self.model(input_ids, positions, self.pool.layers, attn)
        tokens = self._choose(hidden, SamplingRows.of(rows), context_lens, plain)
        advance_rows(self.rows, tokens, self.sampled[:num_rows])

    def _prefill(self, inputs: StepInputs) -> None:
        """Run prompt chunks and sample for those that end a prompt."""
        attn = inputs.attn_of_last(self.workspace)
        hidden = self.model(inputs.input_ids, inputs.positions, self.pool.layers, attn)
        if inputs.sampling is None:
            return
        # A model may have returned those rows alone. If all tokens are wanted they are the same, as they come in order.
        if len(hidden) != len(inputs.last_tokens):
            hidden = hidden.index_select(0, inputs.last_tokens)
        tokens = self._choose(hidden, inputs.sampling, inputs.next_positions, inputs.plain)
        self.sampled[self.max_num_rows : self.max_num_rows + len(tokens)].copy_(tokens)

    def _choose(
        self, hidden: torch.Tensor, sampling: SamplingRows, positions: torch.Tensor, plain: bool
    ) -> torch.Tensor:
        """The two ends of the forward pass: straight to tokens, or logits and then a choice among them.

        The same token comes out where both apply. `positions` are those of the new tokens; they key the noise.
        """
        if plain and self._head is not None:
            return self._head.pick_tokens(hidden, sampling.temperatures, sampling.seeds, positions)
        logits = self.model.compute_logits(hidden)
        if plain:
            return pick_tokens(logits, sampling.temperatures, sampling.seeds, positions)
        return sample_tokens(logits, sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.seeds, positions)

    # ---- for callers with a scheduler of their own ----

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        """Execute one step of sequences that the caller scheduled and wait for its tokens, one a sequence.

        Args:
            seqs: with block tables; for a prefill, tokens from `num_computed_tokens` on are computed.
            is_prefill: prompts, or one decode step.
        """
        self.launch(plan_of(seqs, is_prefill, self.max_num_rows))
        return self.collect()

    @torch.inference_mode()
    def prepare_prefill(self, seqs: list[Sequence]) -> torch.Tensor:
        """Ids `[T]` of the tokens of `seqs` not computed yet; the metadata waits for `run_model` in this thread."""
        chunks = [prefill_chunk(seq, len(seq) - seq.num_computed_tokens) for seq in seqs]
        tile_rows = self.tiling.rows([len(chunk.token_ids) for chunk in chunks])
        self._thread.inputs = prefill_inputs(chunks, self.block_size, tile_rows, self.device)
        return self._thread.inputs.input_ids

    @torch.inference_mode()
    def prepare_decode(self, seqs: list[Sequence]) -> torch.Tensor:
        """Ids `[B]` of the last tokens of `seqs`; the metadata waits for `run_model` in this thread."""
        updates = [row_update(seq, row) for row, seq in enumerate(seqs)]
        self._thread.inputs = decode_inputs(updates, self.block_size, self.workspace, self.device)
        return self._thread.inputs.input_ids

    @torch.inference_mode()
    def run_model(self, input_ids: torch.Tensor, is_prefill: bool, all_positions: bool = False) -> torch.Tensor:
        """Logits of a step that `prepare_prefill` or `prepare_decode` prepared in this thread.

        Args:
            input_ids: what that call returned.
            is_prefill: which of the two it was.
            all_positions: logits `[T, vocabulary]` of every token, instead of the last one of each sequence.

        Raises:
            EngineError: nothing was prepared, or the other kind of step.
        """
        inputs: StepInputs | None = getattr(self._thread, "inputs", None)
        self._thread.inputs = None
        if inputs is None or inputs.is_prefill != is_prefill:
            raise EngineError("call prepare_prefill or prepare_decode, to match is_prefill, right before run_model")
        hidden = self.model(input_ids, inputs.positions, self.pool.layers, inputs.attn)
        if is_prefill and not all_positions:
            hidden = hidden.index_select(0, inputs.last_tokens)
        return self.model.compute_logits(hidden)

    def call(self, method: str, *args: Any) -> Any:
        """Run a method of this class on every rank; the result is that of rank 0."""
        return getattr(self, method)(*args)

    def exit(self) -> None:
        """Give back the model, the pool and the graphs. Calling it again does nothing."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.graphs.reset()
        self.prefill_graphs.reset()
        self._unread.clear()
        for name in ("model", "_head", "pool", "rows", "sampled", "workspace"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
