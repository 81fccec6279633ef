"""Where prefill attention takes its Hopper form, and that form's launch; the kernel is in `prefill_hopper_kernel`."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonllm.kernels.launch import Launch, gpu_of, nvidia_capability
from tritonllm.kernels.paged_attention import LOG2_E
from tritonllm.kernels.prefill_hopper_kernel import _prefill_hopper_kernel

HOPPER_TILE_ROWS = 128
KEYS = 128
_CONSUMER_REGISTERS = 240
_PRODUCER_REGISTERS = 24
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def serves_shape(head_dim: int, dtype: torch.dtype, block_size: int, device: torch.device) -> bool:
    """Whether this form exists for a device and these sizes: Hopper, two-byte floats, whole blocks of 128 keys."""
    return (
        head_dim in (64, 128)
        and dtype in (torch.bfloat16, torch.float16)
        and block_size % KEYS == 0
        and nvidia_capability(device)[0] == 9
    )


def num_stages(head_dim: int) -> int:
    """How many blocks of keys and values shared memory holds beside two tiles of queries; 144 and 208 KiB in all."""
    return 3 if head_dim <= 64 else 2


def is_matrix(x: torch.Tensor) -> bool:
    """Whether x [..., heads, D] of 16 bits is a matrix: heads side by side, rows at a distance that TMA can step."""
    strides = x.stride()
    return strides[-1] == 1 and strides[-2] == x.shape[-1] and strides[-3] % 8 == 0 and x.numel() > 0


def is_matrix_of_slots(cache: torch.Tensor) -> bool:
    """Whether a cache [blocks, block_size, Hk, D] is such a matrix with a row for each slot, counted in 32 bits."""
    blocks, block_size = cache.shape[:2]
    return (
        is_matrix(cache)
        and cache.stride(0) == block_size * cache.stride(1)
        and blocks * block_size < 2**31
        and cache.data_ptr() % 16 == 0
    )


def lies_in_rows(q: torch.Tensor, k_cache: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether each tensor is a matrix of tokens.

    What holds for `k_cache` holds for `v_cache`, whose shape and strides are the same.
    """
    return is_matrix(q) and is_matrix(out) and is_matrix_of_slots(k_cache)


def num_programs(device: torch.device) -> int:
    """One program an SM, all that fit: each takes most of the shared memory."""
    return gpu_of(device).num_sms


def plan_prefill_hopper(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> Launch:
    """Plan this form for arguments that `plan_prefill_attention` has checked, tiles of `HOPPER_TILE_ROWS` rows."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]

    def rows_of(tensor: torch.Tensor, num_rows: int, num_columns: int, box_rows: int) -> TensorDescriptor:
        return TensorDescriptor(tensor, [num_rows, num_columns], [tensor.stride(-3), 1], [box_rows, head_dim], _LAYOUT)

    num_slots = k_cache.shape[0] * block_size
    num_items = tiles.shape[0] * num_heads
    return Launch(
        kernel=_prefill_hopper_kernel,
        grid=(min(num_programs(q.device), num_items),),
        args={
            "q_desc": rows_of(q, q.shape[0], num_heads * head_dim, HOPPER_TILE_ROWS // 2),
            "k_desc": rows_of(k_cache, num_slots, num_kv_heads * head_dim, KEYS),
            "v_desc": rows_of(v_cache, num_slots, num_kv_heads * head_dim, KEYS),
            "out_ptr": out,
            "block_tables_ptr": block_tables,
            "cu_seqlens_q_ptr": cu_seqlens_q,
            "context_lens_ptr": context_lens,
            "tiles_ptr": tiles,
            "scale_log2": scale * LOG2_E,
            "out_token_stride": out.stride(0),
            "table_stride": block_tables.stride(0),
            "num_items": num_items,
        },
        constexprs={
            "NUM_HEADS": num_heads,
            "GROUP": num_heads // num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_N": KEYS,
            "STAGES": num_stages(head_dim),
            "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
            "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
        },
        options={"num_warps": 4},
    )
