"""The pool's layout, its size, and that what was never written is never read."""

from __future__ import annotations

import pytest
import torch

from tritonllm import ModelConfig, RopeConfig, SamplingParams
from tritonllm.engine.kv_cache import KVPool, blocks_on_cpu, blocks_on_gpu, bytes_per_block
from tritonllm.errors import ConfigError
from tritonllm.kernels.kv_store import store_kv

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=96,
    intermediate_size=128,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=64,
    rms_norm_eps=1e-6,
    attention_scale=0.25,
    rope=RopeConfig(16, 64),
)
GIB = 2**30


def pool(num_blocks: int = 5) -> KVPool:
    return KVPool(CONFIG, num_blocks, 4, CONFIG.num_kv_heads, torch.float32, torch.device("cpu"))


def test_layout_is_the_documented_one() -> None:
    made = pool()
    assert made.data.shape == (2, 3, 5, 4, 2, 16)
    assert made.num_blocks == 5
    for layer, (keys, values) in enumerate(made.layers):
        assert keys.data_ptr() == made.data[0, layer].data_ptr()
        assert values.data_ptr() == made.data[1, layer].data_ptr()
        assert keys.shape == values.shape == (5, 4, 2, 16)
    assert made.data.numel() * 4 == 5 * bytes_per_block(CONFIG, 4, 2, torch.float32)


def test_what_is_stored_is_gathered_bit_for_bit() -> None:
    made = pool()
    keys, values = torch.randn(2, 7, 2, 16).unbind()
    slots = torch.tensor([3, 19, 0, -1, 8, 7, 4], dtype=torch.int32)
    store_kv(keys, values, *made.layers[1], slots)
    kept = slots >= 0
    for stored, given in zip(made.layers[1], (keys, values), strict=True):
        assert torch.equal(stored.flatten(0, 1)[slots[kept].long()], given[kept])
    assert not made.data[:, [0, 2]].any()
    assert made.data.flatten(4).any(-1)[:, 1].flatten(1).sum(1).tolist() == [6, 6]


def test_zeroing_touches_whole_blocks_of_every_layer_and_no_other() -> None:
    made = pool()
    made.data.fill_(torch.nan)
    made.zero(torch.tensor([1, 4]))
    assert not made.data[:, :, [1, 4]].any()
    assert made.data[:, :, [0, 2, 3]].isnan().all()


def test_blocks_on_a_gpu() -> None:
    mib = 2**20
    assert blocks_on_gpu(10 * GIB, 0.9, 1 * GIB, GIB // 2, mib) == 9 * 1024 - 1024 - 512
    with pytest.raises(ConfigError, match=r"no KV cache block of 1.0 MiB fits: 1.00 GiB are free"):
        blocks_on_gpu(GIB, 0.5, GIB // 2, 0, mib)


def test_blocks_on_a_cpu_are_bounded_by_its_memory() -> None:
    assert blocks_on_cpu(7, 1024) == 7
    assert blocks_on_cpu(7, 2**60) == 1


def test_what_was_never_written_is_never_read(make_engine) -> None:
    prompts = [[2, 3, 4], [9] * 20, [7], [13] * 40]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = make_engine().generate(prompts, params)
    engine = make_engine()
    engine.runner.pool.data.fill_(torch.nan)
    assert engine.generate(prompts, params) == expected
