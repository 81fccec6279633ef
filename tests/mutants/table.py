"""Faults that the tests must find: for each some text of the source, what takes its place, and who should notice."""

from __future__ import annotations

from generation_table import GENERATION_MUTANTS
from hopper_table import HOPPER_MUTANTS
from kernel_table import KERNEL_MUTANTS
from mutant import Mutant
from sampling_table import SAMPLING_MUTANTS

DEVICE = ("tests/unit/test_cuda_graphs.py", "tests/unit/test_model_runner.py", "tests/unit/test_llm_engine.py")
CONTROLS = ("tests/unit/test_controls.py",)
MIXED = ("tests/unit/test_mixed_steps.py",)
LAST_LAYER = ("tests/unit/test_last_layer.py",)
FAMILIES = ("tests/unit/test_model_config.py", "tests/models/test_families.py")
LIFE = ("tests/unit/test_failures.py", "tests/unit/test_interrupts.py", "tests/unit/test_threads.py")

_BLOCKS = "tritonllm.engine.block_manager"
_SCHEDULER = "tritonllm.engine.scheduler"
_STEADY = "tritonllm.engine.steady_batch"
_ROWS = "tritonllm.engine.rows"
_PLAN = "tritonllm.engine.plan"
_LOOP = "tritonllm.engine.step_loop"

MUTANTS = (
    Mutant(
        "the newest token of a row is counted twice",
        _PLAN,
        "seen=seq.seen(seq.length - 1)",
        "seen=seq.seen(seq.length)",
        CONTROLS,
    ),
    Mutant(
        "a row keeps the counts of its last tenant",
        "tritonllm.engine.control_state",
        "self.counts.index_fill_(0, counted_.long(), 0)",
        "pass",
        CONTROLS,
    ),
    Mutant(
        "a prompt is looked up although its log probabilities are wanted",
        "tritonllm.engine.sequence",
        "return wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1",
        "return wanted and self.num_computed_tokens > 0",
        CONTROLS,
    ),
    Mutant(
        "the surplus behind an end has log probabilities",
        "tritonllm.engine.in_flight",
        "token >= 0 and not seq.is_finished",
        "token >= 0",
        CONTROLS,
    ),
    Mutant(
        "a steady batch forgets how its tokens are chosen",
        _STEADY,
        "replace(plan, new_blocks=new_blocks)",
        "replace(plan, new_blocks=new_blocks, choice=Choice.PLAIN)",
        CONTROLS,
    ),
    Mutant("a steady batch writes behind its last block", _STEADY, "_block_size + 1)", "_block_size + 2)"),
    Mutant(
        "a steady batch goes on past the end", _STEADY, "seq.length >= seq.max_length", "seq.length > seq.max_length"
    ),
    Mutant("a steady batch takes blocks that are not there", _STEADY, "len(due) > manager", "len(due) > 1 + manager"),
    Mutant(
        "an arrival waits until the steady batch ends",
        _SCHEDULER,
        "self._steady = None\n        self.waiting.append(seq)",
        "self.waiting.append(seq)",
    ),
    Mutant(
        "a request that has ended stays in the steady batch",
        _SCHEDULER,
        "self._release_samples(seq)\n        self._steady = None",
        "self._release_samples(seq)",
    ),
    Mutant(
        "blocks that come back late are noticed by nobody",
        _SCHEDULER,
        "            self._steady = None  # somebody",
        "            pass  # somebody",
    ),
    Mutant("the key of a prefix ignores the last token", _BLOCKS, "tuple(token_ids)", "tuple(token_ids[:-1])"),
    Mutant("the key of a prefix ignores the prefix before it", _BLOCKS, "return parent, tuple", "return 0, tuple"),
    Mutant(
        "a recycled block is still found under its old tokens",
        _BLOCKS,
        "self._forget(block_id)\n            self._blocks[block_id].ref_count",
        "self._blocks[block_id].ref_count",
    ),
    Mutant("a new block starts with ref count 0", _BLOCKS, "ref_count = 1", "ref_count = 0"),
    Mutant("a shared block is counted twice", _BLOCKS, "block.ref_count += 1", "block.ref_count += 2"),
    Mutant("freeing counts one too many", _BLOCKS, "block.ref_count -= 1", "block.ref_count -= 2"),
    Mutant(
        "a full last block asks for one more",
        _BLOCKS,
        "return -(-num_tokens // self.block_size)",
        "return num_tokens // self.block_size + 1",
    ),
    Mutant(
        "a last block that is not full is forgotten",
        _BLOCKS,
        "return -(-num_tokens // self.block_size)",
        "return num_tokens // self.block_size",
    ),
    Mutant(
        "the last free block cannot be appended",
        _BLOCKS,
        "len(seq.block_table) <= self.num_free_blocks",
        "len(seq.block_table) < self.num_free_blocks",
    ),
    Mutant(
        "can_append looks at the tokens read, not at those on their way",
        _BLOCKS,
        "self.blocks_for(seq.length) - len",
        "self.blocks_for(len(seq)) - len",
    ),
    Mutant("cached blocks that are free cost nothing", _BLOCKS, "+ free_hits + reserve", "+ reserve"),
    Mutant("a fully cached prompt has nothing left to compute", _BLOCKS, "(len(seq) - 1) // self", "len(seq) // self"),
    Mutant(
        "a preempted sequence counts as computed",
        _BLOCKS,
        "seq.prefix_uid = ROOT_PREFIX\n        seq.num_computed_tokens = 0",
        "seq.prefix_uid = ROOT_PREFIX",
    ),
    Mutant(
        "one block too many counts as found",
        _BLOCKS,
        "seq.num_computed_tokens = len(hits) * self.block_size",
        "seq.num_computed_tokens = (len(hits) + 1) * self.block_size",
    ),
    Mutant(
        "what was found is registered once more, behind itself",
        _BLOCKS,
        "seq.num_registered_blocks = len(hits)",
        "seq.num_registered_blocks = 0",
    ),
    Mutant(
        "a resumed sequence goes on registering where it was",
        _BLOCKS,
        "seq.block_table = []\n        seq.num_registered_blocks = 0",
        "seq.block_table = []",
    ),
    Mutant(
        "blocks that met NaN are still found",
        _BLOCKS,
        "self._forget(block_id)\n            self._blocks[block_id].poisoned",
        "self._blocks[block_id].poisoned",
    ),
    Mutant("blocks that met NaN are not zeroed", _BLOCKS, "self._to_zero.append(block_id)", "pass"),
    Mutant(
        "blocks are found as soon as their step is launched",
        _SCHEDULER,
        "seq.num_computed_tokens = chunk.context_len",
        "seq.num_computed_tokens = chunk.context_len; self.block_manager.register(seq, chunk.context_len)",
    ),
    Mutant(
        "blocks are freed while a step in flight writes to them",
        _SCHEDULER,
        "if seq.num_steps_in_flight == 0:",
        "if True:",
    ),
    Mutant(
        "preemption ignores the unread token", _SCHEDULER, "if stalled or victim.num_steps_in_flight:", "if stalled:"
    ),
    Mutant(
        "the surplus token after the end is appended",
        _SCHEDULER,
        "if seq.is_finished:  # the surplus",
        "if seq.is_finished and (token is None or seq.append_token(token) is None):  # the surplus",
    ),
    Mutant("one token too many", _SCHEDULER, "elif len(seq) >= seq.max_length:", "elif len(seq) > seq.max_length:"),
    Mutant(
        "decoding does not count against the budget",
        _SCHEDULER,
        "prefill_budget(self.max_num_batched_tokens, len(decoding)",
        "prefill_budget(self.max_num_batched_tokens + len(decoding), len(decoding)",
    ),
    Mutant(
        "nothing limits prompts beside decoding",
        "tritonllm.engine.prefill_budget",
        "if limit is None or not num_decoding",
        "if True",
        ("tests/unit/test_prefill_budget.py",),
    ),
    Mutant(
        "prompts that there is no place for count",
        _SCHEDULER,
        "places = min(len(self.waiting), self.max_num_sequences - held)",
        "places = len(self.waiting) if held < self.max_num_sequences else 0",
        ("tests/unit/test_prefill_budget.py",),
    ),
    Mutant(
        "prompts that there are no blocks for count",
        _SCHEDULER,
        "len(self.prefilling) + self._num_admissible(stalled), self",
        "min(len(self.prefilling) + len(self.waiting), self.max_num_sequences - len(self.running)), self",
        ("tests/unit/test_prefill_budget.py",),
    ),
    Mutant(
        "keys of decode rows in a mixed step go where padding goes",
        "tritonllm.engine.inputs",
        "prefill.slot_mapping[:num_rows].copy_(decode.slot_mapping)",
        "prefill.slot_mapping[:num_rows].fill_(-1)",
        MIXED,
    ),
    Mutant(
        "the attention of decode rows in a mixed step is lost",
        "tritonllm.models.attention_metadata",
        "attended[:num_rows].copy_(self.decode.attend(q[:num_rows], *options))",
        "self.decode.attend(q[:num_rows], *options)",
        MIXED,
    ),
    Mutant(
        "chunks behind decode rows are counted from the first token",
        "tritonllm.engine.inputs",
        "chunks), initial=num_rows)",
        "chunks), initial=0)",
        MIXED,
    ),
    Mutant(
        "prompts that end in a mixed step take the tokens of decode rows",
        "tritonllm.engine.device_steps",
        "hidden[num_rows:] if alone",
        "hidden[: len(inputs.last_tokens)] if alone",
        MIXED,
    ),
    Mutant(
        "a layer of one's own is given a mixed step",
        "tritonllm.models.decoder",
        'return all(map(_is_of_the_kit, getattr(self.model, "layers", [None])))',
        "return True",
        MIXED,
    ),
    Mutant(
        "prompts go before decoding",
        _SCHEDULER,
        "if seq.seq_id in stalled or seq.status",
        "if self.prefilling or seq.seq_id in stalled or seq.status",
    ),
    Mutant(
        "a finished prompt takes its neighbour's token",
        _SCHEDULER,
        "seq.token_source = self.max_num_rows + num_sampled",
        "seq.token_source = self.max_num_rows",
    ),
    Mutant(
        "a preempted sequence goes to the end of the queue twice", _SCHEDULER, "appendleft(seq)", "extend([seq] * 2)"
    ),
    Mutant("rows that fall out of the batch are not cleared", _ROWS, "list(range(count, len(self._rows)))", "[]"),
    Mutant("a row does not hear of its new block", _ROWS, "updates, cleared, grown)", "updates, cleared, [])"),
    Mutant("every chunk samples, the last or not", _PLAN, "sample=stop == len(seq)", "sample=True"),
    Mutant("a row starts one token late", _PLAN, "context_len=seq.length,", "context_len=seq.length + 1,"),
    Mutant(
        "positions restart at 0 behind a cached prefix",
        "tritonllm.engine.inputs",
        "positions[start:stop] = where",
        "positions[start:stop] = where - chunk.start",
        DEVICE,
    ),
    Mutant(
        "the last layer looks into another prompt's blocks",
        "tritonllm.engine.inputs",
        "last_sequences[sampled] = index",
        "last_sequences[sampled] = sampled",
        LAST_LAYER,
    ),
    Mutant(
        "the last layer adds its attention to the first tokens",
        "tritonllm.models.decoder",
        "residual = attn.wanted(residual)",
        "residual = residual[: len(hidden)]",
        LAST_LAYER,
    ),
    Mutant(
        "the last layer of a model of four norms adds its attention to the first tokens",
        "tritonllm.models.decoder",
        "stream = attn.wanted(residual)",
        "stream = residual[: len(hidden)]",
        LAST_LAYER,
    ),
    Mutant(
        "the last layer of a post-norm model adds its attention to the first tokens",
        "tritonllm.models.decoder",
        "stream = attn.wanted(stream).add_(attended)",
        "stream = stream[: len(attended)].add_(attended)",
        LAST_LAYER,
    ),
    Mutant(
        "layers without a window get that of the others",
        "tritonllm.config.model",
        "sliding_window=self.sliding_window if sliding else None",
        "sliding_window=self.sliding_window",
        FAMILIES,
    ),
    Mutant(
        "layers with a window rotate as the others",
        "tritonllm.config.model",
        "rope=self.sliding_rope if sliding and self.sliding_rope is not None else self.rope",
        "rope=self.rope",
        FAMILIES,
    ),
    Mutant(
        "a fused path takes the weight of a projection that does more",
        "tritonllm.models.decoder",
        "and type(layer.self_attn.o_proj).forward is type(layer.mlp.down_proj).forward is RowLinear.forward",
        "",
        ("tests/unit/test_decode_path.py",),
    ),
    Mutant(
        "a fused path forgets that norms may have an offset",
        "tritonllm.models.decoder",
        "and not layer.self_attn.unit_offset",
        "",
        ("tests/unit/test_decode_path.py",),
    ),
    Mutant(
        "decode steps forget the window",
        "tritonllm.models.layers",
        "window=self.window,",
        "",
        ("tests/unit/test_decode_path.py",),
    ),
    Mutant(
        "what the last layer looks up is fixed when its metadata is made",
        "tritonllm.engine.inputs",
        "sequences=self.last_sequences,",
        "sequences=self.last_sequences.clone(),",
        LAST_LAYER,
    ),
    Mutant(
        "padding of a short prefill writes to block 0",
        "tritonllm.engine.inputs",
        "slots[:] = -1",
        "slots[:] = 0",
        (*DEVICE, "tests/unit/test_prefill_graphs.py"),
    ),
    Mutant(
        "padding rows write to block 0",
        "tritonllm.kernels.reference.elementwise",
        "block * block_size + positions % block_size, -1)",
        "block * block_size + positions % block_size, 0)",
        DEVICE,
    ),
    Mutant(
        "rows that become padding keep their state on the device",
        "tritonllm.engine.row_changes",
        "for row in plan.cleared_rows]",
        "for row in plan.cleared_rows[:0]]",
        DEVICE,
    ),
    Mutant(
        "Ctrl-C tears a step",
        "tritonllm.engine.guard",
        "if not in_main_thread or",
        "if True or",
        LIFE,
    ),
    Mutant("a second thread is let in", "tritonllm.engine.guard", "threading.RLock()", "threading.Semaphore(99)", LIFE),
    Mutant(
        "a failed engine goes on",
        _LOOP,
        "if self._failure is not None:\n            raise",
        "if False:\n            raise",
        LIFE,
    ),
    Mutant("an interrupted call leaves its requests behind", _LOOP, "self.abandon([", "([", LIFE),
    Mutant(
        "every shard adds the bias",
        "tritonllm.models.linear",
        "self.bias if self.tp.rank == 0 else None",
        "self.bias",
        ("tests/unit/test_layers.py",),
    ),
    Mutant(
        "a kernel's key is made before those of what it calls",
        "tritonllm.kernels.variant",
        "pending.pop().cache_key",
        "pending.pop(0).cache_key",
        ("tests/unit/test_variant.py",),
    ),
    *KERNEL_MUTANTS,
    *SAMPLING_MUTANTS,
    *HOPPER_MUTANTS,
    *GENERATION_MUTANTS,
)
