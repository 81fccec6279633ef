"""What an engine makes of checkpoints that are complete, sharded, tied in four ways, or damaged."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tritonllm import LLMEngine
from tritonllm.errors import CheckpointError, ConfigError, UnknownModelError
from tritonllm.testing import assert_engine_matches, save_tiny_checkpoint, tiny_hf_config

HEAD = "lm_head.weight"
PROMPT = list(range(5, 30))


def open_engine(folder) -> LLMEngine:
    return LLMEngine(str(folder), device="cpu", max_model_length=64, max_num_sequences=1)


@pytest.fixture
def llama(tmp_path):
    """Folder, transformers model and tensors of an untied checkpoint that a test may damage."""
    twin = save_tiny_checkpoint(tiny_hf_config("llama"), tmp_path)
    return tmp_path, twin, load_file(tmp_path / "model.safetensors")


def set_fields(folder, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_shards_make_no_difference(tmp_path) -> None:
    twin = save_tiny_checkpoint(tiny_hf_config("qwen3"), tmp_path, shards=3)
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
    assert_engine_matches(str(tmp_path), twin, PROMPT, chunks=[], device="cpu")


class TestTiedHead:
    """The flag of the config and the tensor in the file: four combinations, all of them in the wild."""

    def test_tied_and_absent(self, tmp_path) -> None:
        twin = save_tiny_checkpoint(tiny_hf_config("llama", tie_word_embeddings=True), tmp_path)
        assert HEAD not in load_file(tmp_path / "model.safetensors")
        assert_engine_matches(str(tmp_path), twin, PROMPT, chunks=[], device="cpu")

    def test_tied_and_present_uses_the_embedding(self, tmp_path) -> None:
        twin = save_tiny_checkpoint(tiny_hf_config("llama", tie_word_embeddings=True), tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        save_file({**tensors, HEAD: tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
        assert_engine_matches(str(tmp_path), twin, PROMPT, chunks=[], device="cpu")

    def test_tied_and_present_but_different_is_an_error(self, llama) -> None:
        folder, _, _ = llama
        set_fields(folder, tie_word_embeddings=True)
        with pytest.raises(CheckpointError, match=r"set tie_word_embeddings to false .*lm_head.weight"):
            open_engine(folder)

    def test_untied_and_present_uses_the_head(self, llama) -> None:
        folder, twin, tensors = llama
        assert not torch.equal(tensors[HEAD], tensors["model.embed_tokens.weight"])
        assert_engine_matches(str(folder), twin, PROMPT, chunks=[], device="cpu")

    def test_untied_and_absent_is_an_error(self, llama) -> None:
        folder, _, tensors = llama
        del tensors[HEAD]
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"missing \(1\): lm_head.weight"):
            open_engine(folder)


class TestDamage:
    def test_a_missing_and_an_unexpected_tensor_are_named(self, llama) -> None:
        folder, _, tensors = llama
        tensors["model.layers.0.self_attn.my_q_proj.weight"] = tensors.pop("model.layers.1.self_attn.k_proj.weight")
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            open_engine(folder)
        assert "missing (1): model.layers.1.self_attn.k_proj.weight" in str(caught.value)
        assert "unexpected (1): model.layers.0.self_attn.my_q_proj.weight" in str(caught.value)

    def test_a_config_with_more_layers_than_the_file(self, llama) -> None:
        folder, _, _ = llama
        set_fields(folder, num_hidden_layers=3)
        with pytest.raises(CheckpointError, match=r"missing \(9\): model.layers.2\."):
            open_engine(folder)

    def test_a_config_with_fewer_layers_than_the_file(self, llama) -> None:
        folder, _, _ = llama
        set_fields(folder, num_hidden_layers=1)
        with pytest.raises(CheckpointError, match=r"unexpected \(9\): model.layers.1\."):
            open_engine(folder)

    def test_q_and_k_swapped(self, llama) -> None:
        folder, _, tensors = llama
        q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
        tensors[q], tensors[k] = tensors[k], tensors[q]
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"wrong shape \(2\)"):
            open_engine(folder)

    def test_weights_of_integers(self, llama) -> None:
        folder, _, tensors = llama
        name = "model.layers.1.mlp.down_proj.weight"
        save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"wrong dtype \(1\): {name} is torch.int8"):
            open_engine(folder)

    @pytest.mark.parametrize("architectures", ["LlamaForCausalLM", 5, [5], [["LlamaForCausalLM"]]])
    def test_architectures_that_are_no_list_of_names(self, llama, architectures) -> None:
        folder, _, _ = llama
        set_fields(folder, architectures=architectures)
        with pytest.raises(ConfigError, match="architectures=.*: give a list of strings") as caught:
            open_engine(folder)
        assert repr(architectures) in str(caught.value)

    def test_no_weights_at_all(self, llama) -> None:
        folder, _, _ = llama
        (folder / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="holds no weights"):
            open_engine(folder)

    def test_no_config(self, llama) -> None:
        folder, _, _ = llama
        (folder / "config.json").unlink()
        with pytest.raises(CheckpointError, match="no config.json"):
            open_engine(folder)

    @pytest.mark.parametrize("name", ["a" * 5000, "~nouser-of-that-name/x", "two\0words"])
    @pytest.mark.parametrize("load_format", ["auto", "dummy"])
    def test_a_name_that_cannot_be_a_path(self, name, load_format) -> None:
        with pytest.raises((CheckpointError, UnknownModelError)):
            LLMEngine(name, device="cpu", load_format=load_format)

    def test_a_path_that_is_not_there(self, tmp_path) -> None:
        with pytest.raises(CheckpointError, match="There is no file or folder"):
            open_engine(tmp_path / "nowhere")
