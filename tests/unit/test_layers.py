"""The kit that model files are built from, layer by layer against plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from tritonllm import ModelConfig, RopeConfig
from tritonllm.errors import CheckpointError, ConfigError, UnsupportedModelError
from tritonllm.kernels.sampling import pick_tokens
from tritonllm.models.layers import (
    Attention,
    GatedMLP,
    GateUpLinear,
    LMHead,
    QKVLinear,
    RMSNorm,
    RotaryEmbedding,
    RowLinear,
    TPGroup,
    VocabEmbedding,
    _norm_over_ranks,
)
from tritonllm.models.tensor_parallel import TPGroup as Group
from tritonllm.models.tensor_parallel import check_world_size, vocab_shard

CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=36,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    rms_norm_eps=1e-5,
    attention_scale=8**-0.5,
    rope=RopeConfig(8, 64),
    mlp_bias=True,
)
ONE = TPGroup()


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@dataclass(frozen=True)
class Gathered(Group):
    """A group whose collectives know what every rank has of two tensors, told apart by their width."""

    tensors: tuple = ()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        (all_of_it,) = [parts for parts in self.tensors if torch.equal(parts[self.rank], tensor)]
        return torch.stack(list(all_of_it))


def fill(module) -> dict[tuple[str, str | None], torch.Tensor]:
    """Load random whole tensors into a module, as the weight loader does; returns them by leaf and slot."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for leaf, slot, shape in module.checkpoint_tensors():
        tensors[leaf, slot] = torch.randn(shape, generator=generator)
        module.load_tensor(leaf, slot, tensors[leaf, slot])
    return tensors


def test_rms_norm() -> None:
    norm = RMSNorm(24, 1e-5)
    norm.weight.copy_(torch.randn(24))
    x, residual = torch.randn(2, 5, 24).unbind()
    expected = F.rms_norm(x, (24,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(x), expected)
    total = x + residual
    torch.testing.assert_close(norm(x, residual), F.rms_norm(total, (24,), norm.weight, 1e-5))
    torch.testing.assert_close(residual, total)  # in place


def test_rms_norm_with_a_unit_offset() -> None:
    norm = RMSNorm(24, 1e-5, unit_offset=True)
    norm.weight.copy_(torch.randn(24))
    x, residual = torch.randn(2, 5, 24).unbind()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (24,), 1 + norm.weight, 1e-5))
    total = x + residual
    torch.testing.assert_close(norm(x, residual), F.rms_norm(total, (24,), 1 + norm.weight, 1e-5))
    with pytest.raises(ValueError, match="cannot be normed with unit_offset=True"):
        norm(x, residual, ONE)


@pytest.mark.parametrize("size", [1, 2])
def test_projections_stored_in_one_tensor_are_split_over_parts_and_ranks(size: int) -> None:
    for apart, stacked in (
        [QKVLinear(24, 6, 2, 8, True, Group(size - 1, size), stacked=stacked) for stacked in (False, True)],
        [GateUpLinear(24, 36, True, Group(size - 1, size), stacked=stacked) for stacked in (False, True)],
    ):
        tensors = fill(apart)
        for leaf in ("weight", "bias"):
            whole = torch.cat([tensor for (name, _), tensor in tensors.items() if name == leaf])
            assert (leaf, None, tuple(whole.shape)) in list(stacked.checkpoint_tensors())
            stacked.load_tensor(leaf, None, whole)
            assert torch.equal(getattr(stacked, leaf), getattr(apart, leaf))
            with pytest.raises(CheckpointError, match=rf"{leaf} has shape \[{len(whole) - 1}"):
                stacked.load_tensor(leaf, None, whole[1:])


def test_qkv_is_three_products_stacked() -> None:
    layer = QKVLinear(24, 6, 2, 8, True, ONE)
    tensors = fill(layer)
    x = torch.randn(5, 24)
    parts = [F.linear(x, tensors["weight", slot], tensors["bias", slot]) for slot in "qkv"]
    assert [part.shape[1] for part in parts] == [48, 16, 16]
    torch.testing.assert_close(layer(x), torch.cat(parts, 1))


def test_gated_mlp() -> None:
    mlp = GatedMLP(CONFIG, ONE)
    gate_up, down = fill(mlp.gate_up_proj), fill(mlp.down_proj)
    x = torch.randn(5, 24)
    gate, up = (F.linear(x, gate_up["weight", slot], gate_up["bias", slot]) for slot in ("gate", "up"))
    expected = F.linear(F.silu(gate) * up, down["weight", None], down["bias", None])
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize(
    ("name", "activation"),
    {
        "swish": F.silu,
        "gelu": F.gelu,
        "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }.items(),
)
def test_other_activations(name: str, activation) -> None:
    mlp = GatedMLP(replace(CONFIG, hidden_act=name), ONE)
    gate_up, down = fill(mlp.gate_up_proj), fill(mlp.down_proj)
    x = torch.randn(5, 24)
    gate, up = (F.linear(x, gate_up["weight", slot], gate_up["bias", slot]) for slot in ("gate", "up"))
    expected = F.linear(activation(gate) * up, down["weight", None], down["bias", None])
    torch.testing.assert_close(mlp(x), expected, atol=1e-4, rtol=1e-5)  # sums of about a hundred


def test_an_activation_that_the_mlp_has_not() -> None:
    with pytest.raises(UnsupportedModelError, match="hidden_act='relu2' is not computed by GatedMLP, only silu, "):
        GatedMLP(replace(CONFIG, hidden_act="relu2"), ONE)


def test_a_multiplier_of_embeddings_is_rounded_first() -> None:
    for dtype, multiplier in ((torch.float32, 3072**0.5), (torch.bfloat16, 55.5)):
        torch.set_default_dtype(dtype)
        try:
            embedding = VocabEmbedding(50, 24, ONE, multiplier=3072**0.5)
        finally:
            torch.set_default_dtype(torch.float32)
        rows = fill(embedding)["weight", None].to(dtype)
        expected = rows[[3, 0]] * torch.tensor(multiplier, dtype=dtype)
        assert torch.equal(embedding(torch.tensor([3, 0])), expected)


def test_a_cap_bounds_logits_and_picks_from_the_capped_ones() -> None:
    head, plain = LMHead(50, 24, ONE, softcap=2.0), LMHead(50, 24, ONE)
    fill(head), fill(plain)
    for rows in (3, 40):  # by the kernel for few rows, and without
        hidden = torch.randn(rows, 24)
        logits = head(hidden)
        torch.testing.assert_close(logits, 2 * torch.tanh(plain(hidden) / 2), atol=1e-5, rtol=1e-5)
        seeds, positions = (
            torch.arange(2 * rows, dtype=torch.int32).view(rows, 2),
            torch.arange(rows, dtype=torch.int32),
        )
        picked = head.pick_tokens(hidden, torch.ones(rows), seeds, positions)
        assert torch.equal(picked, pick_tokens(logits, torch.ones(rows), seeds, positions))


def test_embedding_and_head() -> None:
    embedding, head = VocabEmbedding(50, 24, ONE), LMHead(50, 24, ONE)
    rows, columns = fill(embedding)["weight", None], fill(head)["weight", None]
    ids = torch.tensor([0, 49, 7], dtype=torch.int32)
    assert torch.equal(embedding(ids), rows[ids.long()])
    hidden = torch.randn(3, 24)
    torch.testing.assert_close(head(hidden), hidden @ columns.T)


def test_a_tied_head_shares_the_parameter_and_asks_for_no_tensor() -> None:
    embedding = VocabEmbedding(50, 24, ONE)
    head = LMHead(50, 24, ONE, weight=embedding.weight)
    assert head.weight is embedding.weight
    assert list(head.checkpoint_tensors()) == []


def test_the_head_picks_what_its_logits_say() -> None:
    head = LMHead(50, 24, ONE)
    fill(head)
    hidden = torch.randn(4, 24)
    picked = head.pick_tokens(
        hidden, torch.zeros(4), torch.zeros(4, 2, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    )
    assert picked.tolist() == head(hidden).argmax(1).tolist()


def test_the_rotary_table_is_no_parameter_and_is_not_stored() -> None:
    rotary = RotaryEmbedding(CONFIG.rope, 64)
    assert rotary.cos_sin.shape == (64, 8)
    assert rotary.cos_sin.dtype == torch.float32
    assert not rotary.state_dict()
    assert not list(rotary.parameters())


def test_a_tensor_of_another_shape_is_refused() -> None:
    layer = QKVLinear(24, 6, 2, 8, False, ONE)
    with pytest.raises(CheckpointError, match=r"weight has shape \[16, 24\], the configuration asks for \[48, 24\]"):
        layer.load_tensor("weight", "q", torch.zeros(16, 24))
    with pytest.raises(CheckpointError, match="no slot 'gate' here"):
        layer.load_tensor("weight", "gate", torch.zeros(16, 24))


class TestShards:
    """Layers take their group from the start; the parts of all ranks together are the whole layer."""

    def test_column_parts_side_by_side_are_the_whole(self) -> None:
        x = torch.randn(5, 24)
        whole = QKVLinear(24, 6, 2, 8, True, ONE)
        fill(whole)
        q, k, v = whole(x).split([48, 16, 16], 1)
        for rank in range(2):
            part = QKVLinear(24, 6, 2, 8, True, Group(rank, 2))
            fill(part)
            expected = [tensor.chunk(2, 1)[rank] for tensor in (q, k, v)]
            torch.testing.assert_close(part(x), torch.cat(expected, 1))

    def test_row_parts_add_up_and_the_bias_counts_once(self) -> None:
        x = torch.randn(5, 36)
        whole = RowLinear(36, 24, True, ONE)
        fill(whole)
        total = torch.zeros(5, 24)
        for rank in range(3):
            part = RowLinear(36, 24, True, Group(rank, 3))
            fill(part)
            total += part(x[:, rank * 12 : (rank + 1) * 12])
        torch.testing.assert_close(total, whole(x))

    def test_embedding_parts_add_up_over_a_vocabulary_that_does_not_divide(self) -> None:
        ids = torch.tensor([0, 3, 19, 20, 39, 40, 49])
        whole = VocabEmbedding(50, 24, ONE)
        fill(whole)
        total = torch.zeros(7, 24)
        for rank in range(3):
            part = VocabEmbedding(50, 24, Group(rank, 3))
            fill(part)
            total += part(ids)
        torch.testing.assert_close(total, whole(ids))

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_a_norm_over_all_heads_sees_those_of_other_ranks(self, size: int) -> None:
        config = replace(CONFIG, num_heads=4)
        rotary = RotaryEmbedding(config.rope, 64)
        q, k = torch.randn(5, 32), torch.randn(5, 16)
        width, heads = 32 // size, [Group(rank, size).split_kv_heads(2) for rank in range(size)]
        parts = [k[:, start * 8 : (start + count) * 8] for start, count in heads]
        weights = torch.randn(32), torch.randn(16)
        for rank in range(size):
            attention = Attention(config, rotary, Gathered(rank, size, (q.split(width, 1), parts)), qk_norm="all_heads")
            for norm, weight in zip((attention.q_norm, attention.k_norm), weights, strict=True):
                assert norm.weight.shape == weight.shape  # whole on every rank
                norm.weight.copy_(weight)
            whole = [F.rms_norm(x, x.shape[1:], weight, 1e-5) for x, weight in zip((q, k), weights, strict=True)]
            found = [
                _norm_over_ranks(x, norm, attention.tp)
                for x, norm in ((q.split(width, 1)[rank], attention.q_norm), (parts[rank], attention.k_norm))
            ]
            start, count = heads[rank]
            torch.testing.assert_close(found[0], whole[0].split(width, 1)[rank])
            torch.testing.assert_close(found[1], whole[1][:, start * 8 : (start + count) * 8])

    def test_few_key_heads_are_replicated(self) -> None:
        starts = [Group(rank, 4).split_kv_heads(2) for rank in range(4)]
        assert starts == [(0, 1), (0, 1), (1, 1), (1, 1)]
        assert Group(1, 2).split_kv_heads(2) == (1, 1)

    @pytest.mark.parametrize(("count", "size"), [(28, 8), (14, 4), (18_944, 3), (1, 2)])
    def test_what_does_not_divide_is_refused(self, count: int, size: int) -> None:
        with pytest.raises(ConfigError, match=f"num_heads = {count} cannot be split over world_size = {size}"):
            Group(0, size).split(count, "num_heads")

    @pytest.mark.parametrize(
        ("changes", "size", "message"),
        [
            ({}, 4, r"world_size=4 does not fit this model: num_heads=6 .* 4 ranks; use one of 1, 2\.$"),
            ({}, 3, r"num_kv_heads=2 can neither be split over 3 ranks .*; use one of 1, 2\.$"),
            ({"intermediate_size": 37}, 2, r"intermediate_size=37 .*; use one of 1\.$"),
            ({}, 6, r"vocab_size=50 leaves a rank of 6 without tokens; use one of 1, 2\.$"),
        ],
    )
    def test_valid_world_sizes_are_named(self, changes: dict[str, int], size: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            check_world_size(replace(CONFIG, **changes), size)
        for valid in (1, 2):
            check_world_size(CONFIG, valid)

    @pytest.mark.parametrize("vocab_size", [50, 512, 151_643, 151_936])
    @pytest.mark.parametrize("size", [1, 2, 4, 8])
    def test_vocabulary_shards_cover_it_in_multiples_of_four(self, vocab_size: int, size: int) -> None:
        shards = [vocab_shard(vocab_size, Group(rank, size)) for rank in range(size)]
        assert shards[0][0] == 0
        assert all(start + length == after for (start, length), (after, _) in zip(shards, shards[1:], strict=False))
        assert shards[-1][0] + shards[-1][1] >= vocab_size
        assert all(start % 4 == 0 for start, _ in shards)
