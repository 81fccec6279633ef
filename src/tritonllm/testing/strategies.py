"""Hypothesis strategies for tests of kernels: the shapes, layouts and values that kernels stumble over.

A strategy draws a case: a small frozen value that says what the tensors are made from. So a failing example is short
enough to be read and written down, and shrinks quickly. `case.build(device)` makes the tensors from a seed.

    >>> import torch
    >>> from hypothesis import given, settings
    >>> from tritonllm import kernels
    >>> from tritonllm.testing import strategies
    >>> from tritonllm.testing.tolerances import tolerance

    >>> def my_rms_norm(x, weight, eps):  # the kernel under test
    ...     return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight

    >>> @settings(max_examples=10, deadline=None)
    ... @given(case=strategies.strided_rows())
    ... def test_rms_norm(case):
    ...     x = case.build("cpu")
    ...     weight = torch.ones(case.columns, dtype=case.dtype)
    ...     expected = kernels.rms_norm(x, weight, 1e-6)
    ...     torch.testing.assert_close(my_rms_norm(x, weight, 1e-6), expected, **tolerance("rms_norm", case.dtype))

    >>> test_rms_norm()

| Strategy | Its case builds | Poison |
| --- | --- | --- |
| `paged_batches` | `paged.PagedBatch`: chunks of prompts, for `prefill_attention` | NaN, infinity and wild block ids |
| `decode_batches` | the same with one query a sequence, for `decode_attention` | the same |
| `decode_steps` | `decode_step.Step`, for `fused_decode_attention` | the same, and NaN behind qkv |
| `rotations` | q, k, positions and cos_sin, for `apply_rope` | |
| `strided_rows` | one matrix [tokens, columns] of padded rows | NaN in the padding |
| `logits` | logits [B, V] | infinity behind the rows |
| `sampling_batches` | logits and `sampling_rows.Rows`, for the sampling ops | the same |

Poison must not be read, or must not be used when read: what comes of it is NaN, an infinity, or a fault of the device.
`poison.poisoned_memory` does the same for outputs. Sizes are such that Triton's interpreter, which takes 15 to 20 ms
for a program instance, runs an example in seconds; each size can be given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    if error.name != "hypothesis":
        raise
    raise ModuleNotFoundError(
        "tritonllm.testing.strategies needs hypothesis, which is not installed: "
        "`pip install 'tritonllm-engine[testing]'` brings it.",
        name="hypothesis",
    ) from error

from tritonllm.testing.decode_step import DecodeStepCase, Rotary
from tritonllm.testing.paged import PagedCase, Shape
from tritonllm.testing.sampling_rows import DISTRIBUTIONS, LogitsCase, SamplingCase
from tritonllm.testing.tensors import RopeCase, StridedCase, exact_dtypes

HEAD_DIMS = (32, 64, 80, 96, 128)
"""Two of them are no powers of two."""

RARE_HEAD_DIMS = (48, 72, 160, 256)
"""Of some model each; a few tests of these will do."""

GROUPS = (1, 2, 3, 4, 7)
"""Query heads of one key-value head."""

BLOCK_SIZES = (1, 8, 16, 24, 64, 256)
"""Tokens of a cache block; 24 fits no tile."""

VOCAB_SIZES = (2, 5, 17, 129, 4099)
"""The last is more than one tile, by a few tokens."""

_SEEDS = st.integers(0, 2**16)


def dtypes(among: Sequence[torch.dtype] | None = None) -> st.SearchStrategy[torch.dtype]:
    """float32, float16 and bfloat16, but for bfloat16 in Triton's interpreter, which computes it wrongly."""
    return st.sampled_from(exact_dtypes() if among is None else tuple(among))


def shapes(
    *,
    head_dims: Sequence[int] = HEAD_DIMS,
    groups: Sequence[int] = GROUPS,
    num_kv_heads: Sequence[int] = (1, 2),
    block_sizes: Sequence[int] = BLOCK_SIZES,
) -> st.SearchStrategy[Shape]:
    """Heads and cache; with tokens or heads outermost in a block, which the ops see as other strides alone."""
    return st.builds(
        Shape,
        num_kv_heads=st.sampled_from(num_kv_heads),
        group=st.sampled_from(groups),
        head_dim=st.sampled_from(head_dims),
        block_size=st.sampled_from(block_sizes),
        heads_first=st.booleans(),
    )


def lengths(block_size: int, longest: int, shortest: int = 0) -> st.SearchStrategy[int]:
    """Lengths from `shortest` to `longest`, every other one within one token of the end of a block."""
    edges = {end + offset for end in range(0, longest + 2, block_size) for offset in (-1, 0, 1)}
    near = sorted(edge for edge in edges if shortest <= edge <= longest)
    anywhere = st.integers(shortest, longest)
    return st.one_of(anywhere, st.sampled_from(near)) if near else anywhere


_DTYPES = st.deferred(dtypes)
_PREFILL_SHAPES = shapes(groups=(1, 2, 3))
_DECODE_SHAPES = shapes()
_STEP_SHAPES = shapes(groups=(1, 2, 3, 7))
_COLUMNS = st.sampled_from([1, 7, 64, 576, 1000, 1024])


@st.composite
def paged_batches(
    draw: st.DrawFn,
    *,
    shape: st.SearchStrategy[Shape] = _PREFILL_SHAPES,
    dtype: st.SearchStrategy[torch.dtype] = _DTYPES,
    max_sequences: int = 3,
    max_new: int = 40,
    max_cached: int = 90,
) -> PagedCase:
    """Ragged chunks of prompts behind ragged prefixes, over blocks in random order. A chunk may be empty."""
    drawn = draw(shape)
    chunk = st.tuples(lengths(drawn.block_size, max_new), lengths(drawn.block_size, max_cached))
    chunks = draw(st.lists(chunk, min_size=1, max_size=max_sequences))
    return PagedCase(
        shape=drawn,
        query_lens=tuple(new for new, _ in chunks),
        contexts=tuple(new + cached for new, cached in chunks),
        dtype=draw(dtype),
        seed=draw(_SEEDS),
        layout_seed=draw(_SEEDS),
    )


@st.composite
def decode_batches(
    draw: st.DrawFn,
    *,
    shape: st.SearchStrategy[Shape] = _DECODE_SHAPES,
    dtype: st.SearchStrategy[torch.dtype] = _DTYPES,
    max_sequences: int = 3,
    max_context: int = 300,
    min_context: int = 0,
) -> PagedCase:
    """One query a sequence over ragged contexts. A context of 0 is a row that holds no sequence, and must give 0."""
    drawn = draw(shape)
    context = lengths(drawn.block_size, max_context, min_context)
    contexts = draw(st.lists(context, min_size=1, max_size=max_sequences))
    return PagedCase(
        shape=drawn,
        query_lens=(1,) * len(contexts),
        contexts=tuple(contexts),
        dtype=draw(dtype),
        seed=draw(_SEEDS),
        layout_seed=draw(_SEEDS),
    )


@st.composite
def decode_steps(
    draw: st.DrawFn,
    *,
    shape: st.SearchStrategy[Shape] = _STEP_SHAPES,
    dtype: st.SearchStrategy[torch.dtype] = _DTYPES,
    max_sequences: int = 3,
    max_context: int = 200,
) -> DecodeStepCase:
    """Decode batches whose new tokens are still in qkv; whole or half heads rotated, with head norms or without."""
    batch = draw(decode_batches(shape=shape, dtype=dtype, max_sequences=max_sequences, max_context=max_context))
    rotary = draw(st.builds(Rotary, part=st.sampled_from([1, 1, 2]), normed=st.booleans()))
    return DecodeStepCase(batch.shape, rotary, batch.contexts, batch.dtype, batch.seed, batch.layout_seed)


@st.composite
def rotations(
    draw: st.DrawFn,
    *,
    head_dims: Sequence[int] = HEAD_DIMS,
    groups: Sequence[int] = GROUPS,
    dtype: st.SearchStrategy[torch.dtype] = _DTYPES,
    max_tokens: int = 4,
    max_position: int = 4096,
) -> RopeCase:
    """Heads inside a QKV row, any positions below `max_position`, whole heads rotated or a quarter of each."""
    num_kv_heads, head_dim = draw(st.sampled_from([1, 2])), draw(st.sampled_from(head_dims))
    return RopeCase(
        num_heads=num_kv_heads * draw(st.sampled_from(groups)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=draw(st.sampled_from([head_dim, head_dim // 4 * 2, head_dim // 8 * 2])),
        positions=tuple(draw(st.lists(st.integers(0, max_position - 1), max_size=max_tokens))),
        theta=draw(st.sampled_from([1e4, 5e5, 1e6])),
        dtype=draw(dtype),
        seed=draw(_SEEDS),
    )


def strided_rows(
    *,
    columns: st.SearchStrategy[int] = _COLUMNS,
    dtype: st.SearchStrategy[torch.dtype] = _DTYPES,
    max_tokens: int = 5,
) -> st.SearchStrategy[StridedCase]:
    """Rows as they lie in something wider; with a padding of 0 they are contiguous, with 3 they are not aligned."""
    return st.builds(
        StridedCase,
        tokens=st.integers(0, max_tokens),
        columns=columns,
        padding=st.sampled_from([0, 3, 8, 64]),
        dtype=dtype,
        seed=_SEEDS,
    )


def logits(
    *,
    vocab_sizes: Sequence[int] = VOCAB_SIZES,
    dtype: st.SearchStrategy[torch.dtype] = _DTYPES,
    max_rows: int = 3,
) -> st.SearchStrategy[LogitsCase]:
    """Rows each of a distribution of its own, from one token that holds nearly all mass to none that stands out."""
    return st.builds(
        LogitsCase,
        distributions=st.lists(st.sampled_from(DISTRIBUTIONS), min_size=1, max_size=max_rows).map(tuple),
        vocab_size=st.sampled_from(vocab_sizes),
        dtype=dtype,
        seed=_SEEDS,
    )


@st.composite
def sampling_batches(
    draw: st.DrawFn,
    *,
    vocab_sizes: Sequence[int] = VOCAB_SIZES,
    dtype: st.SearchStrategy[torch.dtype] = _DTYPES,
    max_rows: int = 3,
) -> SamplingCase:
    """Logits with greedy and random rows, top-k and top-p on, off and at their edges, all mixed in one batch."""
    rows = draw(logits(vocab_sizes=vocab_sizes, dtype=dtype, max_rows=max_rows))
    count, size = len(rows.distributions), rows.vocab_size
    temperature = st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 1.5])
    top_k = st.one_of(st.sampled_from([-1, 0, 1, size - 1, size, size + 1]), st.integers(1, size))
    top_p = st.sampled_from([0.0, 1e-9, 0.3, 0.8, 0.95, 0.999, 1.0, 1.5])

    def column(values: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    return SamplingCase(rows, column(temperature), column(top_k), column(top_p), draw(_SEEDS))
