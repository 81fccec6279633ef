"""Dummy weights depend on the seed and the checkpoint's names only: not on order, sharding or what else there is."""

from __future__ import annotations

import pytest
import torch
from sharded_model import TinyModel, checkpoint

from tritonllm.weights import dummy_weights
from tritonllm.weights.dummy import dummy_tensor

CPU = torch.device("cpu")


def filled(seed=0, **options):
    model = TinyModel(**options)
    dummy_weights(model, seed)
    return model


def test_every_parameter_is_filled_and_the_seed_decides():
    first, again, other = filled(), filled(), filled(seed=1)
    for name, parameter in first.named_parameters():
        assert parameter.isfinite().all(), name
        assert torch.equal(parameter, again.get_parameter(name))
        if "norm.weight" not in name:
            assert not torch.equal(parameter, other.get_parameter(name)), name


def test_a_fused_parameter_holds_the_tensors_of_its_checkpoint_names():
    fused = filled(seed=3).model.layers[1].self_attn.qkv_proj.weight
    names = [f"model.layers.1.self_attn.{slot}_proj.weight" for slot in "qkv"]
    tensors = [dummy_tensor(3, name, tuple(checkpoint()[name].shape), CPU) for name in names]
    assert torch.equal(fused, torch.cat(tensors))


@pytest.mark.parametrize("tied", [False, True])
def test_every_world_size_holds_the_same_model(tied):
    whole = filled(tied=tied)
    ranks = [filled(tied=tied, rank=rank, size=2) for rank in (0, 1)]
    for find in (lambda model: model.lm_head.weight, lambda model: model.model.embed_tokens.weight):
        assert torch.equal(torch.cat([find(model) for model in ranks]), find(whole))
    gates = [model.model.layers[0].mlp.gate_up_proj.weight[:6] for model in ranks]
    assert torch.equal(torch.cat(gates), whole.model.layers[0].mlp.gate_up_proj.weight[:12])


def test_norm_weights_are_one_and_everything_else_is_normal():
    layer = filled().model.layers[0]
    assert torch.equal(layer.self_attn.q_norm.weight, torch.ones(4))
    assert torch.equal(layer.mlp.up_proj_norm.weight, torch.ones(12))
    assert not torch.equal(layer.mlp.up_proj_norm.bias, torch.zeros(12))
    sample = dummy_tensor(0, "model.layers.0.mlp.up_proj.weight", (400, 500), CPU)
    assert sample.std().item() == pytest.approx(0.02, rel=0.02)
    assert sample.mean().item() == pytest.approx(0.0, abs=2e-4)


def test_a_norm_is_recognised_by_its_own_name_only():
    assert torch.equal(dummy_tensor(0, "model.norm.weight", (4,), CPU), torch.ones(4))
    assert not torch.equal(dummy_tensor(0, "normal_model.layers.0.gate.weight", (4,), CPU), torch.ones(4))
    assert not torch.equal(dummy_tensor(0, "model.norm.weight", (4, 1), CPU), torch.ones(4, 1))


def test_a_tied_head_is_the_embedding():
    model = filled(tied=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, dummy_tensor(0, "model.embed_tokens.weight", (16, 8), CPU))
