"""The soak of the GPU lane at a size for a CPU, and what it judges with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tritonllm import ModelConfig, SamplingParams
from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

FOLDER = Path(__file__).parents[1] / "gpu"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    """tests/gpu/soak.py as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("gpu_soak", FOLDER / "soak.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["gpu_soak"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_soak(soak, capsys, dtype: str) -> None:
    """Every output of a crowd under pressure is that of the request alone."""
    sizes = "--requests 20 --longest 100 --outputs 4 16 --pool 1.2 --rows 8 --budget 48 --block-size 4"
    assert soak.main([*sizes.split(), "--dtypes", dtype, "--device", "cpu", "--model", "tiny"]) == 0, (
        capsys.readouterr().out
    )
    report = capsys.readouterr().out
    assert "mismatches           0" in report
    assert "preemptions          0" not in report


@pytest.mark.parametrize(
    ("ours", "reason", "near_ties", "mismatches", "compared"),
    [
        ([1, 2, 3], "length", 0, 0, 3),
        ([1, 2], "abort", 0, 0, 2),
        ([], "abort", 0, 0, 0),
        ([1, 2], "length", 0, 1, 2),
        ([1, 4, 9], "length", 1, 0, 2),
        ([1, 5, 3], "length", 0, 1, 2),
        ([5], "abort", 0, 1, 1),
    ],
)
def test_differences_are_judged_by_the_scores_of_the_two_tokens(
    soak, ours: list[int], reason: str, near_ties: int, mismatches: int, compared: int
) -> None:
    """Tokens 2 and 4 score nearly the same, 1 and 5 do not."""
    asked = []

    def logits(token_ids: list[int], num_last: int) -> torch.Tensor:
        asked.append(token_ids)
        return torch.tensor([[0.0, 3.0, 2.0, 3.0, 2.05, 0.0]])

    request = soak.Request([7, 8], SamplingParams(temperature=0), None, tokens=ours, finish_reason=reason)
    verdict = soak.Verdict()
    soak.judge(request, [1, 2, 3], SimpleNamespace(logits=logits), 0.1, verdict)
    assert (len(verdict.near_ties), len(verdict.mismatches), verdict.compared) == (near_ties, mismatches, compared)
    assert asked == ([[7, 8, *ours[: compared - 1]]] if asked else [])


@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {"heads": "28/4x32"})],
)
def test_the_reference_is_transformers_without_its_roundings(soak, tmp_path, family: str, fields: dict) -> None:
    config = tiny_hf_config(family, **fields)
    twin = save_tiny_checkpoint(config, tmp_path)
    ours = ModelConfig.from_hf_dict(twin.config.to_dict())
    cpu = torch.device("cpu")
    tensors = soak.weights_of(str(tmp_path), ours, False, cpu)
    token_ids = torch.randint(0, 512, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    reference = soak.NaiveDecoder(ours, tensors, torch.float32, torch.float64, cpu)
    found = reference.logits(token_ids, 7)
    with torch.inference_mode():
        expected = twin(torch.tensor([token_ids])).logits[0, -7:]
    torch.testing.assert_close(found, expected.double(), atol=1e-3, rtol=0)
    dummy = soak.weights_of(str(tmp_path), ours, True, cpu)
    assert {name: tensor.shape for name, tensor in dummy.items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }
