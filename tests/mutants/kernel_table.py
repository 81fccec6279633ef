"""Faults of kernels, found in the interpreter: masks, strides, addresses of 32 bits, rules of rounding and ties."""

from __future__ import annotations

from mutant import Mutant


def _kernel(name: str, module: str, old: str, new: str, *tests: str) -> Mutant:
    files = tuple(f"tests/kernels/test_{test}.py" for test in tests)
    return Mutant(name, f"tritonllm.kernels.{module}", old, new, files, interpreted=True)


KERNEL_MUTANTS = (
    # norm, activation
    _kernel(
        "a norm divides by one column too many",
        "norm",
        "sum_of_squares / COLUMNS",
        "sum_of_squares / (COLUMNS + 1)",
        "norm",
    ),
    _kernel(
        "a norm has no epsilon",
        "norm",
        "COLUMNS + eps)",
        "COLUMNS)",
        "norm",
    ),
    _kernel("the first part of a sum is left out", "norm", "x += tl.load(x_ptr", "x = tl.load(x_ptr", "norm"),
    _kernel(
        "silu has a mask one column too narrow",
        "activation",
        "mask = column < COLUMNS",
        "mask = column < COLUMNS - 1",
        "activation",
    ),
    _kernel(
        "gate and up are exchanged",
        "activation",
        "activated * up.to(tl.float32)",
        "gate.to(tl.float32) * silu(up.to(tl.float32))",
        "activation",
    ),
    # rotation and cache
    _kernel("heads turn the other way", "rope", "tl.fma(x, cos, -y * sin)", "tl.fma(x, cos, y * sin)", "rope"),
    _kernel(
        "a head too many is rotated",
        "rope",
        "mask = (head < NUM_HEADS) & (dim < HALF)",
        "mask = (head <= NUM_HEADS) & (dim < HALF)",
        "rope",
    ),
    _kernel("a token without a slot is stored", "kv_store", "if slot >= 0:", "if slot >= -1:", "kv_store"),
    _kernel(
        "a cache row has the wrong place in its block",
        "kv_store",
        "slot % BLOCK_SIZE * token_stride",
        "slot % (BLOCK_SIZE - 1) * token_stride",
        "kv_store",
    ),
    _kernel(
        "a slot's address has 32 bits",
        "kv_store",
        "tl.load(slot_mapping_ptr + token).to(tl.int64)",
        "tl.load(slot_mapping_ptr + token)",
        "far_blocks",
    ),
    _kernel(
        "a fused slot's address has 32 bits",
        "rope_store",
        "tl.load(slot_mapping_ptr + token).to(tl.int64)",
        "tl.load(slot_mapping_ptr + token)",
        "far_blocks",
    ),
    _kernel(
        "values are not stored", "rope_store", "tl.store(v_cache_ptr + head", "tl.store(v_ptr + head", "rope_store"
    ),
    # attention
    _kernel(
        "a block's address has 32 bits",
        "paged_attention",
        "block_ids.to(tl.int64) * block_stride",
        "block_ids * block_stride",
        "far_blocks",
    ),
    _kernel(
        "the stride of a block is that of a token",
        "paged_attention",
        "tokens.to(tl.int64) * token_stride",
        "tokens.to(tl.int64) * block_stride",
        "decode_attention",
    ),
    _kernel(
        "the running sum does not decay",
        "paged_attention",
        "acc * decay[:, None], input_precision",
        "acc, input_precision",
        "prefill_attention",
    ),
    _kernel(
        "values behind a context are not masked",
        "split_attention",
        "values = tl.load(v_ptrs + offsets[:, None], mask=mask, other=0.0)",
        "values = tl.load(v_ptrs + offsets[:, None])",
        "decode_attention",
    ),
    _kernel(
        "a decode step sees a key too many",
        "split_attention",
        "tl.arange(0, BLOCK_N) < num_keys",
        "tl.arange(0, BLOCK_N) <= num_keys",
        "decode_attention",
    ),
    _kernel(
        "a merge forgets the peaks",
        "split_attention",
        "decay = tl.exp2(peaks - tl.max(peaks, 1)[:, None])",
        "decay = tl.exp2(peaks - peaks)",
        "decode_attention",
    ),
    _kernel(
        "the counter of a merge stays",
        "split_attention",
        'tl.atomic_xchg(counter_ptr, 0, sem="relaxed", scope="gpu")',
        "pass",
        "decode_attention",
    ),
    _kernel(
        "queries do not see themselves",
        "prefill_attention",
        "key_positions[None, :] <= positions[:, None]",
        "key_positions[None, :] < positions[:, None]",
        "prefill_attention",
    ),
    _kernel(
        "values on the diagonal are not masked",
        "prefill_attention",
        "values = tl.load(v_ptrs + kv_offsets[:, None], mask=kv_mask, other=0.0)",
        "values = tl.load(v_ptrs + kv_offsets[:, None])",
        "prefill_attention",
    ),
    _kernel(
        "a tile writes the rows of the next sequence",
        "prefill_attention",
        "row_mask = (rows < query_len)[:, None]",
        "row_mask = (rows <= query_len)[:, None]",
        "prefill_attention",
    ),
    _kernel(
        "the new key is not attended to",
        "fused_decode_attention",
        "is_new = tl.arange(0, BLOCK_G) == GROUP",
        "is_new = tl.arange(0, BLOCK_G) < 0",
        "fused_decode_attention",
    ),
    _kernel(
        "the new value lands in the keys",
        "fused_decode_attention",
        "tl.store(v_cache_ptr + cache_offset + dim, new_value",
        "tl.store(k_cache_ptr + cache_offset + dim, new_value",
        "fused_decode_attention",
    ),
    _kernel(
        "of equal lengths the later comes first",
        "longest_first",
        "other[None, :] < row[:, None]",
        "other[None, :] > row[:, None]",
        "longest_first",
    ),
    # linear layers
    _kernel(
        "a matrix-vector product has no norm weight",
        "skinny_gemv",
        "scale_and_weigh(xs[step], scale, norms[step])",
        "scale_and_weigh(xs[step], scale, norms[step] * 0 + 1)",
        "skinny_linear",
    ),
    _kernel(
        "an output behind the last is written",
        "skinny_gemv",
        "y, mask=(row < N) & (cell == 0)",
        "y, mask=(row <= N) & (cell == 0)",
        "skinny_linear",
    ),
    _kernel(
        "a token too many is written",
        "skinny_dot",
        "y, mask=(row < N) & (token < num_tokens)",
        "y, mask=(row < N) & (token <= num_tokens)",
        "skinny_linear",
    ),
    # rows and tokens
    _kernel(
        "padding rows advance",
        "decode_rows",
        "live = context_len > 0\n    tl.store(sampled_ptr",
        "live = mask\n    tl.store(sampled_ptr",
        "decode_rows",
    ),
    _kernel(
        "a token outside the vocabulary is looked up",
        "decode_rows",
        "(token < VOCAB_SIZE), token, 0)",
        "(token <= VOCAB_SIZE), token, 0)",
        "decode_rows",
    ),
    _kernel(
        "of equal scores the highest id wins",
        "sampling",
        "winner = tl.min(tl.where(kept & (score == best), token, _NO_TOKEN), axis=0)",
        "winner = tl.max(tl.where(kept & (score == best), token, -1), axis=0)",
        "sampling",
    ),
    _kernel("NaN is not told", "sampling", "tl.where(has_nan, -1, winner)", "winner", "sampling"),
    _kernel("noise ignores the position", "noise", "zero + position.to(tl.uint32)", "zero", "sampling"),
    _kernel(
        "top-k keeps a token less",
        "kept_set",
        "needed = top_k.to(tl.int64)",
        "needed = top_k.to(tl.int64) - 1",
        "kept_set",
    ),
    _kernel(
        "top-p keeps a token less",
        "kept_set",
        "tl.ceil(top_p.to(tl.float64) * total.to(tl.float64))",
        "tl.floor(top_p.to(tl.float64) * total.to(tl.float64) * 0.9)",
        "kept_set",
    ),
    _kernel(
        "the noise of a shard is that of its columns",
        "sampling",
        "position, FIRST_ID + tile * TILE,",
        "position, tile * TILE,",
        "sampling",
    ),
    # controls and log probabilities
    _kernel(
        "min-p is a share of the whole mass before top-p",
        "kept_set",
        "inside = inside & (x >= _min_p_cut",
        "inside = inside & (x != _min_p_cut",
        "kept_set",
    ),
    _kernel(
        "a token that is in the prompt alone is not repeated",
        "logit_controls",
        "x = tl.where(word != 0, repeated, x)",
        "x = tl.where((word & 0x7FFF) > 0, repeated, x)",
        "logit_controls",
    ),
    _kernel(
        "a full count begins anew",
        "logit_controls",
        " & ((word & 0x7FFF) < 0x7FFF)",
        "",
        "logit_controls",
    ),
    _kernel(
        "a forbidden token hides NaN",
        "logit_controls",
        "x = tl.where(allowed | (x != x), x,",
        "x = tl.where(allowed, x,",
        "logit_controls",
    ),
    _kernel(
        "padding counts its last token",
        "logit_controls",
        "if tl.load(row_ptr + CONTEXT_LEN) <= 0:",
        "if tl.load(row_ptr + CONTEXT_LEN) < 0:",
        "logit_controls",
    ),
    _kernel(
        "an end is forbidden for one token more",
        "logit_controls",
        "context_len < min_length",
        "context_len <= min_length",
        "logit_controls",
    ),
    _kernel(
        "a token with a bias escapes the mask",
        "logit_controls",
        "forbidden = forbidden | (_is_allowed(masks_ptr + row * masks_stride, token, kept) == 0)",
        "forbidden = forbidden | (_is_allowed(masks_ptr + row * masks_stride, token, kept) > 1)",
        "logit_controls",
    ),
    _kernel(
        "of equal logits the higher id is reported first",
        "logprobs",
        "(0x7FFFFFFF - token).to(tl.int64)",
        "token.to(tl.int64)",
        "logprobs",
    ),
    _kernel(
        "a token is not the best of its equals",
        "logprobs",
        "(x > chosen).to(tl.int32)",
        "(x >= chosen).to(tl.int32)",
        "logprobs",
    ),
    # sums over ranks
    _kernel(
        "two sums in a row use the same slots",
        "peer_all_reduce_kernels",
        "(row * 2 + (count & 1)) * WORLD",
        "row * 2 * WORLD",
        "peer_all_reduce",
    ),
    _kernel(
        "a rank adds up another rank's share",
        "peer_all_reduce_kernels",
        "column = rank * SHARE + place",
        "column = (rank + 1) % WORLD * SHARE + place",
        "peer_all_reduce",
    ),
    _kernel(
        "words are taken before they have come",
        "peer_all_reduce_kernels",
        "(words >> 32).to(tl.int32) != count",
        "(words >> 32).to(tl.int32) > count",
        "peer_all_reduce",
    ),
    _kernel(
        "a sum is counted twice",
        "peer_all_reduce_kernels",
        "tl.store(state_ptr + row, count)",
        "tl.store(state_ptr + row, count + 1)",
        "peer_all_reduce",
    ),
    _kernel(
        "the flags of two sums are one",
        "peer_all_reduce_kernels",
        "flags + RANKS * 4, rank",
        "flags, rank",
        "peer_all_reduce",
    ),
)
