"""The device side of a step: upload what changed, run the model, sample, advance. No host sync in between.

Every line here runs for every token. Think twice before adding one.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from tritonllm.config import EngineConfig
from tritonllm.engine.control_state import ControlState
from tritonllm.engine.cuda_graphs import DecodeGraphs
from tritonllm.engine.device_steps import HALVES, DeviceSteps, Part
from tritonllm.engine.inputs import StepInputs, chunk_inputs, decode_inputs
from tritonllm.engine.kv_cache import KVPool, blocks_on_cpu, blocks_on_gpu, bytes_per_block
from tritonllm.engine.logprobs import StepLogprobs
from tritonllm.engine.plan import PrefillChunk, RowUpdate, StepPlan, masks_of, plan_of, prefill_chunk, row_update
from tritonllm.engine.prefill_graphs import PrefillGraphs, prefill_layouts
from tritonllm.engine.rank_process import Rank0
from tritonllm.engine.ranks import Ranks, start_ranks
from tritonllm.engine.resolve import ResolvedModel, build_model, resolve_model
from tritonllm.engine.row_changes import apply_row_changes
from tritonllm.engine.sequence import Sequence
from tritonllm.engine.step_results import StepResults
from tritonllm.engine.token_choice import TokenChoice
from tritonllm.engine.upload import to_device
from tritonllm.engine.warm_up import run_small_and_largest, take_product_workspace
from tritonllm.errors import EngineError
from tritonllm.kernels.decode_attention import DecodeWorkspace
from tritonllm.kernels.decode_rows import HEADER, load_rows
from tritonllm.kernels.launch import compiling_ahead
from tritonllm.kernels.prefill_tiling import PrefillTiling
from tritonllm.models.tensor_parallel import TPGroup


class ModelRunner:
    """Holds the model, the KV pool and the decode rows of one rank, and executes step plans.

    `launch(plan)` queues a step on the device and returns; `collect()` waits for the oldest launched step and returns
    its tokens. `run(seqs, is_prefill)` does both for sequences that the caller scheduled.

    On rank 0 of a larger world it starts the other ranks, and `call(method, ...)` runs a method on all of them.

    Args:
        config: the engine's configuration.
        rank: this process among the tensor-parallel ranks.
        event: on another rank than 0, its group and the calls of rank 0.
        resolved: what `config` was resolved to, if the caller has done that.

    Raises:
        EngineError: another rank failed; with its traceback, and nothing is left of any rank.
    """

    def __init__(
        self, config: EngineConfig, rank: int = 0, event: Rank0 | None = None, *, resolved: ResolvedModel | None = None
    ) -> None:
        self.resolved = resolved if resolved is not None else resolve_model(config)
        self.config = self.resolved.engine
        self.rank = rank
        self.device = self.resolved.device
        self.dtype = getattr(torch, self.config.dtype)
        self.max_num_rows = self.config.max_num_sequences
        self.block_size = self.config.block_size
        self._event = event
        self.ranks: Ranks | None = None
        if rank or self.config.world_size == 1 or self.device.type == "meta":
            self._start(event.group if event is not None else TPGroup(rank, self.config.world_size))
            return
        self.ranks = start_ranks(self.resolved, self._drop_graphs)
        with self.ranks.guarded(closing=True):
            self._start(self.ranks.group)
            self.ranks.wait_until_ready()

    def _start(self, tp: TPGroup) -> None:
        self.tp = tp
        with torch.inference_mode():
            take_product_workspace(self.device)
            self.model = build_model(self.resolved, tp)
            if others := self.ranks or self._event:
                others.wait_until_loaded()
            self._make_state(tp)
        self._thread = threading.local()
        self.logprobs: StepLogprobs | None = None
        self.graphs = DecodeGraphs(self._steps.decode, self.max_num_rows)
        self.prefill_graphs = self.make_prefill_graphs(self.device.type != "cpu" and not self.config.enforce_eager)
        self._make_pool()

    def _make_state(self, tp: TPGroup) -> None:
        model = self.resolved.config
        num_heads, self.num_kv_heads = model.num_heads // tp.size, tp.split_kv_heads(model.num_kv_heads)[1]
        sizes = num_heads, model.head_dim, self.dtype, self.block_size, self.device
        self.tiling = PrefillTiling.choose(*sizes, hopper=model.has_plain_attention)
        table_width = -(-(self.config.max_model_length or 1) // self.block_size)
        width = -(-(HEADER + table_width) // 16) * 16
        self._block_bytes = bytes_per_block(model, self.block_size, self.num_kv_heads, self.dtype)
        self.rows = torch.zeros(self.max_num_rows, width, dtype=torch.int32, device=self.device)
        self.results = StepResults(self.max_num_rows, model.vocab_size, self.device)
        self.sampled = self.results.tokens
        self.controls = ControlState.allocate(self.max_num_rows, model.vocab_size, self.device)
        heads = num_heads, self.num_kv_heads, model.head_dim
        self.workspace = DecodeWorkspace.allocate(self.max_num_rows, *heads, self.device)
        choose, state = TokenChoice(self.model, self.results), (self.rows, self.sampled, self.controls, self.workspace)
        ids = self.block_size, model.vocab_size
        self._steps = DeviceSteps(self.model, choose, *state, lambda: self.pool.layers, *ids)
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._unchosen: StepPlan | None = None  # the step launched last, if it waits for masks

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
            self._drop_graphs()
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
        bytes_of_ranks = self._block_bytes * self.tp.size  # which share one host's memory
        fitting = self.config.max_cached_blocks or blocks_on_cpu(wanted, bytes_of_ranks)
        self.num_blocks = self.tp.minimum(fitting)
        self.pool = self._new_pool(self.num_blocks)

    def _compile_ahead(self) -> None:
        """Compile side by side what the rest of the start would compile one by one."""
        # Its kernel is the one that runs inside as well, and so is compiled before.
        load_rows(self.rows, self.max_num_rows, self.block_size, self.resolved.config.vocab_size)
        with compiling_ahead():
            self._decode_every_size()
            self._prefill_every_kernel()

    def _decode_every_size(self) -> None:
        for size in self.graphs.buckets:
            for part in HALVES:
                self._steps.decode(size, part)

    def warmup_model(self) -> int:
        """Run `warm_up_prefills` on the pool at hand, which compiles their kernels; returns the bytes they needed."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._prefill_every_kernel()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def _prefill_every_kernel(self) -> None:
        heads = self.num_kv_heads, self.resolved.config.head_dim
        run_small_and_largest(self._steps, self.config, self.tiling, heads, self.workspace, self.device)

    def allocate_kv_cache(self, activations: int = 0, graphs: int = 0) -> None:
        """Replace the pool by one as large as device memory allows, given the bytes that other things need."""
        del self.pool
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        fitting = blocks_on_gpu(free, self.config.gpu_memory_utilization, activations, graphs, self._block_bytes)
        self.num_blocks = self.tp.minimum(min(fitting, self.config.max_cached_blocks or fitting))
        self.pool = self._new_pool(self.num_blocks)

    def capture_cudagraph(self) -> None:
        """Capture the decode step of every bucket, and short prefills."""
        self.graphs.capture()
        self.prefill_graphs.capture()

    def make_prefill_graphs(self, padded: bool) -> PrefillGraphs:
        """What runs prompt chunks: short ones padded to a few sizes that can be captured, or each as it is."""
        layouts = []
        if padded:
            budget = self.config.max_num_batched_tokens
            layouts = prefill_layouts(budget, self.max_num_rows, self.rows.shape[1] - HEADER, self.tiling.portable_rows)
        return PrefillGraphs(self._steps.prefill, layouts, self.block_size, self.tiling, self.device)

    def _new_pool(self, num_blocks: int) -> KVPool:
        return KVPool(self.resolved.config, num_blocks, self.block_size, self.num_kv_heads, self.dtype, self.device)

    # ---- one step ----

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Queue a step of this rank: changed rows, then the decode rows and the prompt chunks, together or in turn."""
        if plan.zero_blocks:
            self.pool.zero(to_device(plan.zero_blocks, self.device).long())
        apply_row_changes(plan, self.rows, self.sampled, self.controls)
        num_rows, chunks = plan.num_decode_rows, plan.chunks
        if self._steps.mixed.share_pass(plan, self.prefill_graphs):
            inputs = chunk_inputs(chunks, self.block_size, self.tiling, self.device, num_rows)
            self._steps.decode_and_prefill(num_rows, plan.choice, inputs)
            num_rows, chunks = 0, []
        if plan.waits_for_masks:
            self._unchosen = plan
            self.graphs.run_part(num_rows, Part.FORWARD)
        elif num_rows:
            self.graphs.run(num_rows, plan.choice)
        if chunks:
            self.prefill_graphs.run(chunks)
        if not (plan.waits_for_masks or self.rank):  # every rank chose the same tokens; rank 0 reads them
            self.results.send(plan)

    @torch.inference_mode()
    def choose(self, masks: list[tuple[int, bytes]]) -> None:
        """Queue the second half of the step launched last, whose plan waits for masks.

        Args:
            masks: rows, each with int32 words of the tokens that may come next, as `GrammarMatcher.mask` gives them.

        Raises:
            EngineError: no launched step waits.
        """
        plan, self._unchosen = self._unchosen, None
        if plan is None:
            raise EngineError("choose() was called without a step that waits for masks; call launch(plan) first")
        if masks:
            self.controls.write_masks(masks, self._copies)
        self.graphs.run_part(plan.num_decode_rows, Part.CONTROLLED_END)
        if not self.rank:
            self.results.send(plan)

    def collect(self) -> list[int]:
        """Wait for the oldest launched step: one token for each decode row, then one for each chunk that samples.

        What the step reports of them is in `logprobs` until the next call.

        Raises:
            EngineError: every launched step has been collected.
        """
        if not len(self.results):
            raise EngineError("collect() was called without a launched step; call launch(plan) first")
        tokens, self.logprobs = self.results.receive(None if self.ranks is None else self.ranks.wait)
        return tokens

    # ---- for callers with a scheduler of their own ----

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        """Execute one step of sequences that the caller scheduled and wait for its tokens, one a sequence.

        Args:
            seqs: with block tables; for a prefill, tokens from `num_computed_tokens` on are computed.
            is_prefill: prompts, or one decode step.
        """
        plan = plan_of(seqs, is_prefill, self.max_num_rows)
        self.call("launch", plan)
        if plan.waits_for_masks:
            self.call("choose", masks_of(seqs))
        return self.collect()

    def prepare_prefill(self, seqs: list[Sequence]) -> torch.Tensor:
        """Ids `[T]` of the tokens of `seqs` not computed yet; the metadata waits for `run_model` in this thread."""
        return self._prepare([prefill_chunk(seq, len(seq) - seq.num_computed_tokens) for seq in seqs], [])

    def prepare_decode(self, seqs: list[Sequence]) -> torch.Tensor:
        """Ids `[B]` of the last tokens of `seqs`; the metadata waits for `run_model` in this thread."""
        return self._prepare([], [row_update(seq, row) for row, seq in enumerate(seqs)])

    @torch.inference_mode()
    def _prepare(self, chunks: list[PrefillChunk], updates: list[RowUpdate]) -> torch.Tensor:
        self._thread.prepared = chunks, updates
        if chunks:
            self._thread.inputs = chunk_inputs(chunks, self.block_size, self.tiling, self.device)
        else:
            self._thread.inputs = decode_inputs(updates, self.block_size, self.workspace, self.device)
        return self._thread.inputs.input_ids

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
        if inputs is None or inputs.is_prefill != is_prefill:
            self._thread.inputs = None
            raise EngineError("call prepare_prefill or prepare_decode, to match is_prefill, right before run_model")
        sent_ids = input_ids if self.ranks is None else input_ids.cpu()
        return self.call("_logits", sent_ids, all_positions, *self._thread.prepared)

    @torch.inference_mode()
    def _logits(
        self, input_ids: torch.Tensor, all_positions: bool, chunks: list[PrefillChunk], updates: list[RowUpdate]
    ) -> torch.Tensor:
        if self.rank:
            self._prepare(chunks, updates)
        inputs: StepInputs = self._thread.inputs
        self._thread.inputs = None
        hidden = self.model(input_ids.to(self.device), inputs.positions, self.pool.layers, inputs.attn)
        if inputs.is_prefill and not all_positions:
            hidden = hidden.index_select(0, inputs.last_tokens)
        return self.model.compute_logits(hidden)

    # ---- every rank ----

    def call(self, method: str, *args: Any) -> Any:
        """Run a method of this class on every rank; the result is that of rank 0.

        Raises:
            EngineError: another rank failed; with its traceback.
        """
        if self.ranks is None or method == "exit":  # which ends the other ranks itself
            return getattr(self, method)(*args)
        with self.ranks.guarded():
            self.ranks.publish(method, args)
            return getattr(self, method)(*args)

    def loop(self) -> None:
        """On another rank than 0: run what rank 0 calls, up to `exit`."""
        if self._event is None:
            raise EngineError("loop() runs on the ranks that an engine starts; call it on none of your own")
        method = ""
        while method != "exit":
            method, args = self._event.receive()
            getattr(self, method)(*args)

    def exit(self) -> None:
        """Give back the model, the pool and the graphs, and end the other ranks. Calling it again does nothing."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._drop_graphs()
            state = ("rows", "sampled", "results", "controls", "workspace")
            for name in ("model", "_steps", "graphs", "prefill_graphs", "pool", *state):
                self.__dict__.pop(name, None)
        finally:
            (self.ranks or self.tp).close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop_graphs(self) -> None:
        for name in {"graphs", "prefill_graphs"} & self.__dict__.keys():  # a start may fail before there are any
            getattr(self, name).reset()
