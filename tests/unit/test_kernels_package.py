"""`tritonllm.kernels` and `tritonllm.kernels.reference`: the same ops, called the same way, from a plain program."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tritonllm import kernels
from tritonllm.kernels import reference, row_layout
from tritonllm.testing.decode_step import Rotary, decode_step
from tritonllm.testing.paged import Shape, paged_batch
from tritonllm.testing.sampling_rows import Rows
from tritonllm.testing.tensors import Draw, bits, rope_table

OPS = reference.__all__
MAY_BE_LEFT_OUT = {"decode_attention": {"workspace"}, "fused_decode_attention": {"workspace"}}
CPU = torch.device("cpu")
SHAPE = Shape(num_kv_heads=2, group=3, head_dim=32, block_size=4)


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_every_op_has_a_reference_and_every_reference_an_op() -> None:
    ops = {name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))}
    assert ops - {"prefill_tiles"} == set(OPS)  # which runs on the host: there is nothing to refer to


@pytest.mark.parametrize("name", OPS)
def test_a_reference_is_called_like_its_op(name: str) -> None:
    ours, theirs = parameters(getattr(kernels, name)), parameters(getattr(reference, name))
    assert list(theirs) == list(ours)
    for parameter in ours:
        assert theirs[parameter].kind == ours[parameter].kind, parameter
        if parameter in MAY_BE_LEFT_OUT.get(name, ()):
            assert theirs[parameter].default is None
        else:
            assert theirs[parameter].default == ours[parameter].default, parameter
            assert theirs[parameter].annotation == ours[parameter].annotation, parameter
    assert inspect.signature(getattr(reference, name)).return_annotation == (
        inspect.signature(getattr(kernels, name)).return_annotation
    )


def arguments_of(name: str) -> dict[str, Any]:
    """Small arguments by name, new ones at each call."""
    draw = Draw(7, CPU)
    heads = SHAPE.num_heads + 2 * SHAPE.num_kv_heads
    workspace = kernels.DecodeWorkspace.allocate(2, SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim, CPU)
    if name in ("prefill_attention", "decode_attention"):
        queries = [3, 2] if name == "prefill_attention" else [1, 1]
        batch = paged_batch(SHAPE, queries, [5, 9], torch.float32, CPU, seed=1)
        shared = dict(zip(("k_cache", "v_cache", "block_tables"), batch.cache, strict=True))
        shared |= {"q": batch.q, "context_lens": batch.context_lens, "scale": SHAPE.scale}
        if name == "decode_attention":
            return shared | {"workspace": workspace, "order": kernels.longest_first(batch.context_lens)}
        tiling = kernels.PrefillTiling.choose(SHAPE.num_heads, SHAPE.head_dim, torch.float32, SHAPE.block_size, CPU)
        rows = tiling.rows(queries)
        tiles = torch.tensor(kernels.prefill_tiles(queries, [5, 9], rows), dtype=torch.int32)
        return shared | {"cu_seqlens_q": batch.cu_seqlens_q, "tiles": tiles, "tile_rows": rows}
    if name == "fused_decode_attention":
        step = decode_step(SHAPE, Rotary(part=1, normed=True), [5, 9], torch.float32, CPU, seed=1)
        names = list(parameters(kernels.fused_decode_attention))
        shared = dict(zip(names, step.arguments(step.caches()), strict=False))
        return shared | {
            "num_heads": SHAPE.num_heads,
            "scale": SHAPE.scale,
            "workspace": workspace,
            **step.norms,
            "eps": 0.1,
            "window": 3,
            "softcap": 2.0,
        }
    k_cache, v_cache = draw.caches(4, SHAPE.block_size, SHAPE.num_kv_heads, SHAPE.head_dim, False, torch.float32)
    caches = {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": draw.slots(3, 16)}
    angles = {"positions": draw.integers(0, 9, 3), "cos_sin": rope_table(9, SHAPE.head_dim)}
    k, v = (draw.normal(3, SHAPE.num_kv_heads, SHAPE.head_dim) for _ in range(2))
    state = draw.integers(0, 9, 4, row_layout.HEADER + 3)
    controlled = draw.integers(1, 4, 2, row_layout.HEADER)
    penalties = torch.tensor([1.5, 0.5, 0.25]).view(torch.int32)
    controlled[:, row_layout.REPETITION_PENALTY : row_layout.CONTROLS] = penalties
    sampled = Rows([0.0, 1.0], [0, 3], [1.0, 0.9], CPU)
    random = {"seeds": sampled.seeds, "positions": sampled.positions}
    filters = {"top_ks": sampled.top_ks, "top_ps": sampled.top_ps, "min_ps": torch.tensor([0.0, 0.4])}
    logits = {"logits": draw.normal(2, 50), "temperatures": sampled.temperatures}
    layer = {"x": draw.rows(3, 16, 8, torch.float32), "weight": draw.normal(10, 16), "bias": draw.normal(10)}
    return {
        "rms_norm": {"x": draw.normal(3, 16), "weight": draw.normal(16), "eps": 1e-6, "unit_offset": True},
        "add_rms_norm": {
            "x": draw.normal(3, 16), "residual": draw.normal(3, 16), "weight": draw.normal(16), "eps": 1e-6,
            "unit_offset": True,
        },
        "silu_and_mul": {"gate_up": draw.normal(3, 16)},
        "gelu_and_mul": {"gate_up": draw.normal(3, 16), "tanh": True},
        "apply_rope": {"q": draw.normal(3, SHAPE.num_heads, SHAPE.head_dim), "k": k, **angles},
        "store_kv": {"k": k, "v": v, **caches},
        "rope_store_kv": {
            "qkv": draw.normal(3, heads * SHAPE.head_dim), **angles, **caches, "num_heads": SHAPE.num_heads,
            "q_norm": draw.normal(SHAPE.head_dim), "k_norm": draw.normal(SHAPE.head_dim), "eps": 0.1,
            "unit_offset": True,
        },
        "longest_first": {"context_lens": draw.integers(0, 5, 9)},
        "skinny_linear": {
            **layer, "norm_weight": draw.normal(16), "eps": 0.1, "residual": draw.normal(3, 5), "gated": True,
            "activation": "gelu",
        },
        "hopper_linear": {**layer, "gated": True, "activation": "gelu_tanh"},
        "hopper_linear_parts": layer,
        "load_rows": {"rows": state, "num_rows": 3, "block_size": 4, "vocab_size": 6},
        "advance_rows": {"rows": state, "tokens": draw.integers(0, 9, 3), "sampled": draw.integers(0, 9, 3)},
        "kept_threshold": logits | filters,
        "pick_tokens": logits | random,
        "pick_from_shard": logits | random | {"first_id": 8},
        "adjust_logits": {
            "logits": draw.normal(2, 50), "rows": controlled, "counts": draw.integers(0, 2, 2, 50).short(),
            "masks": draw.integers(-(2**31), 2**31 - 1, 2, 2),
            "biases": torch.tensor([[[9, 0, 0], [3, 1, 0], [4, 5, 9]]] * 2, dtype=torch.int32),
            "bad_words": torch.tensor([[[8, 2], [7, -1]]] * 2, dtype=torch.int32),
            "recent": torch.tensor([[1, 2]] * 2, dtype=torch.int32),
        },
        "token_logprobs": {
            "logits": draw.normal(3, 50), "tokens": draw.integers(0, 50, 3), "wanted": draw.integers(0, 2, 3),
            "num_top": 4,
        },
        "merge_picks": {"scores": draw.normal(3, 2), "tokens": draw.integers(-1, 9, 3, 2)},
        "sample_tokens": logits | filters | random,
    }[name]  # fmt: skip


def written(result: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """What a call returned and what it may have changed, as bits."""
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    tensors = [*results, *(value for value in arguments.values() if isinstance(value, torch.Tensor))]
    return [bits(tensor) for tensor in tensors]


@pytest.mark.parametrize("name", OPS)
def test_on_a_cpu_an_op_is_its_reference(name: str) -> None:
    """By name, every argument: so each is handed on, and nothing else is computed."""
    ours, theirs = arguments_of(name), arguments_of(name)
    actual = written(getattr(kernels, name)(**ours), ours)
    expected = written(getattr(reference, name)(**theirs), theirs)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["decode_attention", "fused_decode_attention"])
def test_a_reference_needs_no_workspace(name: str) -> None:
    without = arguments_of(name)
    del without["workspace"]
    expected = getattr(reference, name)(**arguments_of(name))
    assert torch.equal(getattr(reference, name)(**without), expected)


def test_the_error_is_the_one_that_ops_raise() -> None:
    from tritonllm.kernels.norm import plan_rms_norm

    x = torch.empty(2, 4, device="meta")
    with pytest.raises(kernels.KernelError, match="weight must be contiguous"):
        plan_rms_norm(x, torch.empty(5, device="meta"), x, 1e-6)
    assert isinstance(plan_rms_norm(x, torch.empty(4, device="meta"), x, 1e-6), kernels.Launch)
