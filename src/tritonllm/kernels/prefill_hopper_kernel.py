"""The Hopper form of prefill attention: the same sums as `prefill_attention`, on the hardware's asynchronous units.

One producer warp moves queries, keys and values into shared memory by TMA and runs ahead, into the next tile too; two
consumer warpgroups of 64 query rows each compute with wgmma. Keys are visited from the diagonal backwards, so only the
first blocks need a mask. The scores of a block and the values of the one before are issued together, and row maxima are
taken behind the latter (FlashAttention-3, arXiv:2407.08608). Programs are persistent: one an SM, which deals itself
(tile, head) pairs.

Written in Gluon, which is part of Triton and lays out memory and barriers by hand. It has no interpreter: this form is
compared with the reference on a GPU only, and the other form holds wherever this one does not.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonllm.kernels.gluon_adapter import load_async


@gluon.jit
def _index_at(turn):
    """The item of a program in a turn. Items come longest first, so every other turn is dealt the other way around:
    else the first program would have the longest of every turn."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _tile_at(turn, num_items, tiles_ptr, NUM_HEADS: gl.constexpr):
    """Sequence and first row of the tile of a turn; of the last tile where there is none."""
    tile = gl.minimum(_index_at(turn), num_items - 1) // NUM_HEADS
    return gl.load(tiles_ptr + 2 * tile), gl.load(tiles_ptr + 2 * tile + 1)


@gluon.jit
def _extent(sequence, first_row, exists, cu_seqlens_q_ptr, context_lens_ptr, BLOCK_N: gl.constexpr):
    """Tokens before the sequence of a tile, its query length and context length, and how many blocks of keys the tile
    reads (0: padding, or behind the last)."""
    query_start = gl.load(cu_seqlens_q_ptr + sequence)
    query_len = gl.load(cu_seqlens_q_ptr + sequence + 1) - query_start
    context_len = gl.load(context_lens_ptr + sequence)
    end = gl.minimum(context_len, context_len - query_len + first_row + 128)
    num_blocks = gl.where((first_row < query_len) & exists, (end + BLOCK_N - 1) // BLOCK_N, 0)
    return query_start, query_len, context_len, num_blocks


@gluon.jit
def _produce(
    descriptors,
    smem,
    schedule,
    block_tables_ptr,
    table_stride,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    q_desc, k_desc, v_desc = descriptors
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = smem
    num_items, tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr = schedule
    # With two stages the next keys must come while these values are in use, so a place of keys is free before that of
    # their values. With more, one barrier for both is less work.
    KEYS_APART: gl.constexpr = STAGES == 2
    loaded = 0  # blocks of keys so far, over all tiles: says which stage comes next and in which phase it is
    taken = 0
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        index = _index_at(turn)
        sequence, first_row = _tile_at(turn, num_items, tiles_ptr, NUM_HEADS)
        query_start, query_len, context_len, num_blocks = _extent(
            sequence, first_row, index < num_items, cu_seqlens_q_ptr, context_lens_ptr, BLOCK_N
        )
        if num_blocks > 0:
            head = index % NUM_HEADS
            column = head // GROUP * HEAD_DIM
            place = taken % 2
            mbarrier.wait(q_empty.index(place), ((taken // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(place), 128 * HEAD_DIM * 2)
            token = query_start + first_row
            load_async(q_desc, [token, head * HEAD_DIM], q_full.index(place), q_smem.index(2 * place))
            load_async(q_desc, [token + 64, head * HEAD_DIM], q_full.index(place), q_smem.index(2 * place + 1))
            taken += 1
            table_row_ptr = block_tables_ptr + sequence.to(gl.int64) * table_stride
            for i in range(num_blocks):
                stage = loaded % STAGES
                phase = ((loaded // STAGES) & 1) ^ 1
                start = (num_blocks - 1 - i) * BLOCK_N
                row = gl.load(table_row_ptr + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
                if KEYS_APART:
                    mbarrier.wait(k_empty.index(stage), phase)
                else:
                    mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), BLOCK_N * HEAD_DIM * 2)
                load_async(k_desc, [row, column], k_full.index(stage), k_smem.index(stage))
                if KEYS_APART:
                    mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), BLOCK_N * HEAD_DIM * 2)
                load_async(v_desc, [row, column], v_full.index(stage), v_smem.index(stage))
                loaded += 1


@gluon.jit
def _peak_and_decay(scores, peak, scale_log2):
    """The peak with a block of scores, and what sums so far decay by."""
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    return new_peak, gl.exp2(peak - new_peak)


@gluon.jit
def _weigh(scores, peak, scale_log2):
    return gl.exp2(scores * scale_log2 - gl.expand_dims(peak, 1))


@gluon.jit
def _quarter_sums(weights, BLOCK_N: gl.constexpr):
    """Sums [64, 4] of what each of the four threads of a row holds: they meet once, at the end of a tile."""
    return gl.sum(gl.sum(gl.reshape(weights, [64, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _clear_tail(v_smem, first_key, context_len, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zero the values behind the context: a weight of zero would not cancel the NaN that may lie there.

    Both consumers do it, with equal results, so neither waits for the other.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    values = v_smem.load(LAYOUT)
    v_smem.store(gl.where(gl.expand_dims(keys < context_len, 1), values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _consume(
    smem,
    schedule,
    out_ptr,
    out_token_stride,
    scale_log2,
    WARPGROUP: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty = smem
    num_items, tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr = schedule
    DTYPE: gl.constexpr = k_smem.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    KEYS_APART: gl.constexpr = STAGES == 2  # as in `_produce`
    zeros = gl.full([64, BLOCK_N], 0.0, gl.float32, SCORES)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    done = 0
    taken = 0
    next_sequence, next_first_row = _tile_at(0, num_items, tiles_ptr, NUM_HEADS)
    for turn in range((num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        index = _index_at(turn)
        sequence = next_sequence
        first_row = next_first_row
        query_start, query_len, context_len, num_blocks = _extent(
            sequence, first_row, index < num_items, cu_seqlens_q_ptr, context_lens_ptr, BLOCK_N
        )
        next_sequence, next_first_row = _tile_at(turn + 1, num_items, tiles_ptr, NUM_HEADS)
        if num_blocks > 0:
            peak = gl.full([64], -1.0e30, gl.float32, ROWS)
            acc = gl.full([64, HEAD_DIM], 0.0, gl.float32, SUMS)
            row = first_row + WARPGROUP * 64
            first_position = context_len - query_len + row
            positions = first_position + gl.arange(0, 64, ROWS)

            stage = done % STAGES
            phase = (done // STAGES) & 1
            first_key = (num_blocks - 1) * BLOCK_N
            place = taken % 2
            mbarrier.wait(q_full.index(place), (taken // 2) & 1)
            query = q_smem.index(2 * place + WARPGROUP)
            taken += 1
            mbarrier.wait(k_full.index(stage), phase)
            scores = warpgroup_mma(query, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if KEYS_APART:
                mbarrier.arrive(k_empty.index(stage))
            # A masked score is -inf: a large finite number would lose its meaning times the scale.
            visible = gl.expand_dims(first_key + columns, 0) <= gl.expand_dims(positions, 1)
            scores = gl.where(visible, scores, float("-inf"))
            peak, _ = _peak_and_decay(scores, peak, scale_log2)
            weights = _weigh(scores, peak, scale_log2)
            total = _quarter_sums(weights, BLOCK_N)
            QUARTERS: gl.constexpr = gl.SliceLayout(1, total.type.layout)
            weights = gl.convert_layout(weights.to(DTYPE), WEIGHTS)
            if first_key + BLOCK_N > context_len:
                mbarrier.wait(v_full.index(stage), phase)
                _clear_tail(v_smem.index(stage), first_key, context_len, HEAD_DIM, BLOCK_N)

            following = done + 1
            ready = k_full.index(following % STAGES)
            mbarrier.wait(ready, (following // STAGES) & 1, pred=num_blocks > 1)
            for i in range(1, num_blocks):
                value_stage = done % STAGES
                value_phase = (done // STAGES) & 1
                done += 1
                stage = done % STAGES
                scores = warpgroup_mma(query, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(value_stage), value_phase)
                acc = warpgroup_mma(weights, v_smem.index(value_stage), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                if KEYS_APART:
                    mbarrier.arrive(k_empty.index(stage))
                first_key = (num_blocks - 1 - i) * BLOCK_N
                if first_key + BLOCK_N - 1 > first_position:  # the first row does not see the last key
                    visible = gl.expand_dims(first_key + columns, 0) <= gl.expand_dims(positions, 1)
                    scores = gl.where(visible, scores, float("-inf"))
                peak, decay = _peak_and_decay(scores, peak, scale_log2)
                # The next keys are waited for here, since this wait is a branch: ptxas would move the next one up to
                # before the maxima. Exponentials follow, so that scaling and packing run while they are computed.
                following = done + 1
                ready = k_full.index(following % STAGES)
                mbarrier.wait(ready, (following // STAGES) & 1, pred=i + 1 < num_blocks)
                acc = warpgroup_mma_wait(0, deps=[acc, weights])[0]
                mbarrier.arrive(v_empty.index(value_stage))
                acc = acc * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, SUMS)), 1)
                new_weights = _weigh(scores, peak, scale_log2)
                total = total * gl.expand_dims(gl.convert_layout(decay, QUARTERS), 1)
                total += _quarter_sums(new_weights, BLOCK_N)
                weights = gl.convert_layout(new_weights.to(DTYPE), WEIGHTS)

            mbarrier.arrive(q_empty.index(place))
            stage = done % STAGES
            mbarrier.wait(v_full.index(stage), (done // STAGES) & 1)
            acc = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc, weights])[0]
            mbarrier.arrive(v_empty.index(stage))
            done += 1

            acc = acc / gl.expand_dims(gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SUMS)), 1)
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, STORED))
            dims = index % NUM_HEADS * HEAD_DIM + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORED))
            offsets = gl.expand_dims((query_start + rows).to(gl.int64) * out_token_stride, 1) + gl.expand_dims(dims, 0)
            stored = gl.convert_layout(acc.to(DTYPE), STORED)
            gl.store(out_ptr + offsets, stored, mask=gl.expand_dims(rows < query_len, 1))


@gluon.jit(do_not_specialize=["table_stride", "num_items"])
def _prefill_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    block_tables_ptr,
    cu_seqlens_q_ptr,
    context_lens_ptr,
    tiles_ptr,
    scale_log2,
    out_token_stride,
    table_stride,
    num_items,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    q_smem = gl.allocate_shared_memory(k_desc.dtype, [4, 64, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        mbarrier.init(q_full.index(place), count=1)
        mbarrier.init(q_empty.index(place), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    smem = (q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    schedule = (num_items, tiles_ptr, cu_seqlens_q_ptr, context_lens_ptr)
    descriptors = (q_desc, k_desc, v_desc)
    gl.warp_specialize(
        [
            (
                _consume,
                (smem, schedule, out_ptr, out_token_stride, scale_log2, 0, NUM_HEADS, HEAD_DIM, BLOCK_N, STAGES),
            ),
            (
                _consume,
                (smem, schedule, out_ptr, out_token_stride, scale_log2, 1, NUM_HEADS, HEAD_DIM, BLOCK_N, STAGES),
            ),
            (
                _produce,
                (
                    descriptors,
                    smem,
                    schedule,
                    block_tables_ptr,
                    table_stride,
                    NUM_HEADS,
                    GROUP,
                    HEAD_DIM,
                    BLOCK_SIZE,
                    BLOCK_N,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
