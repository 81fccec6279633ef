"""What a user may write into an `EngineConfig`, and what the error says when it is wrong."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonllm.config import EngineConfig
from tritonllm.config.engine import _FOREIGN_NAMES, ARCHITECTURE_KEYS
from tritonllm.errors import ConfigError

FIELDS = {field.name: field for field in dataclasses.fields(EngineConfig)}
COUNTS = [
    "world_size",
    "max_num_sequences",
    "max_num_batched_tokens",
    "max_prefill_tokens_beside_decode",
    "max_num_batch_tokens",
    "max_cached_blocks",
    "block_size",
    "max_model_length",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
]
FLAGS = ["enforce_eager", "qkv_bias", "ffn_bias", "tie_word_embeddings"]
POSITIVE = ["gpu_memory_utilization", "base", "rms_norm_epsilon", "scale"]
NAMES = ["dtype", "device", "load_format", "model_name_or_path", "revision", "tokenizer"]


def config(**keys: Any) -> EngineConfig:
    return EngineConfig(model_name_or_path="org/model", **keys)


def test_defaults_are_those_of_the_documented_dict() -> None:
    made = config()
    assert (made.world_size, made.max_num_sequences, made.max_num_batched_tokens, made.block_size) == (1, 16, 1024, 256)
    assert (made.gpu_memory_utilization, made.enforce_eager) == (0.9, False)
    assert (made.dtype, made.device, made.load_format) == ("auto", "auto", "auto")
    assert made.max_model_length is None
    assert made.max_cached_blocks is None
    assert made.architecture == {}
    assert made.eos_token_ids == ()


def test_warm_up_size_is_the_budget_unless_given() -> None:
    assert config(max_num_batched_tokens=300).warm_up_tokens == 300
    assert config(max_num_batched_tokens=300, max_num_batch_tokens=4000).warm_up_tokens == 4000


def test_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().block_size = 16  # type: ignore[misc]


def test_import_needs_no_torch() -> None:
    program = "import sys, tritonllm.config, tritonllm.sampling_params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", ["2", 2.0, True, 0, -1, float("nan")])
def test_counts_refuse(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert "integer" in str(caught.value)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["yes", 1, 0, 1.0])
def test_flags_refuse(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value!r} .*True or False"):
        config(**{name: value})


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", ["1", True, 0, -0.5, float("nan"), float("inf"), 10**400])
def test_positive_numbers_refuse(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*finite number > 0"):
        config(**{name: value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["", "  ", 7, True, ["x"]])
def test_names_refuse(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        EngineConfig(**{"model_name_or_path": "m", name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "fp16"),
        ("device", "cuda:1"),
        ("load_format", "gguf"),
        ("gpu_memory_utilization", 1.01),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", None),
        ("head_dim", 65),
        ("eos", -1),
        ("eos", True),
        ("eos", [1, "2"]),
        ("eos", 1.0),
    ],
)
def test_other_ranges(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.*: give "):
        config(**{name: value})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.default is not None])
def test_none_is_refused_where_there_is_a_default(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=None"):
        EngineConfig(**{"model_name_or_path": "m", name: None})


def misspellings(key: str) -> list[str]:
    middle = len(key) // 2
    return [key[:-1], key + "x", key[:middle] + key[middle + 1 :], key.upper(), key.replace("_", "-") + "-"]


@pytest.mark.parametrize("key", sorted(FIELDS))
def test_a_misspelt_key_names_the_key(key: str) -> None:
    for wrong in misspellings(key):
        if wrong in FIELDS or wrong == "max_num_seqs":
            continue
        with pytest.raises(ConfigError, match=f"{wrong!r}: did you mean '{key}'"):
            EngineConfig.from_dict({"model_name_or_path": "m", wrong: 1})


@pytest.mark.parametrize(("foreign", "key"), _FOREIGN_NAMES.items())
def test_a_name_of_other_engines_gives_ours(foreign: str, key: str) -> None:
    assert key in FIELDS
    for make in (lambda: config(**{foreign: 2}), lambda: config().replace(**{foreign: 2})):
        with pytest.raises(ConfigError, match=f"'{foreign}': did you mean '{key}'"):
            make()


def test_a_key_like_no_other_lists_the_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        config(zzz=1)
    assert all(name in str(caught.value) for name in FIELDS)
    with pytest.raises(ConfigError, match="not a string"):
        EngineConfig.from_dict({"model_name_or_path": "m", 3: 1})  # type: ignore[dict-item]


def test_the_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match="model_name_or_path is missing"):
        EngineConfig.from_dict({"block_size": 16})
    with pytest.raises(ConfigError, match="must be a mapping"):
        EngineConfig.from_dict("org/model")  # type: ignore[arg-type]


def test_only_the_model_may_be_positional() -> None:
    assert EngineConfig("org/model", block_size=16) == config(block_size=16)
    with pytest.raises(ConfigError, match="model_name_or_path=7"):
        EngineConfig(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        EngineConfig("org/model", 1)  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig("org/model", model_name_or_path="other")  # type: ignore[misc]


def test_a_path_is_a_name(tmp_path: Path) -> None:
    made = EngineConfig(model_name_or_path=tmp_path, tokenizer=tmp_path)  # type: ignore[arg-type]
    assert made.model_name_or_path == made.tokenizer == str(tmp_path)


def test_aliases() -> None:
    assert config(max_num_seqs=4).max_num_sequences == 4
    assert config(max_num_seqs=4, max_num_sequences=4).max_num_sequences == 4
    assert config().replace(max_num_seqs=5).max_num_sequences == 5
    with pytest.raises(ConfigError, match="max_num_seqs=4 and max_num_sequences=5"):
        config(max_num_seqs=4, max_num_sequences=5)


def test_lengths_must_fit_the_positions() -> None:
    assert config(max_position=64, max_model_length=64).max_model_length == 64
    with pytest.raises(ConfigError, match="max_model_length=65 is above max_position=64"):
        config(max_position=64, max_model_length=65)


def test_a_config_is_copied_and_pickled_like_any_value() -> None:
    made = config(eos=[1, 2], head_dim=64)
    assert copy.copy(made) == pickle.loads(pickle.dumps(made)) == dataclasses.replace(made) == made
    assert hash(made) == hash(copy.copy(made))
    assert made.replace(block_size=16).block_size == 16
    assert made.block_size == 256
    with pytest.raises(ConfigError):
        made.replace(block_size=0)


def test_from_dict_leaves_the_dict_alone() -> None:
    keys = {"model_name_or_path": "m", "max_num_seqs": 3, "eos": [1, 2]}
    EngineConfig.from_dict(keys)
    assert keys == {"model_name_or_path": "m", "max_num_seqs": 3, "eos": [1, 2]}


count = st.integers(1, 2**20)
values = {
    "max_num_sequences": count,
    "max_num_batched_tokens": count,
    "max_prefill_tokens_beside_decode": count,
    "max_num_batch_tokens": st.none() | count,
    "max_cached_blocks": st.none() | count,
    "block_size": count,
    "max_model_length": st.none() | st.integers(1, 1000),
    "eos": st.none() | st.integers(0, 2**31 - 1) | st.lists(st.integers(0, 2**31 - 1)),
    "enforce_eager": st.booleans(),
    "gpu_memory_utilization": st.floats(0, 1, exclude_min=True),
    "dtype": st.sampled_from(["auto", "bfloat16", "float16", "float32"]),
    "device": st.sampled_from(["auto", "cuda", "cpu"]),
    "all_reduce": st.sampled_from(["auto", "nccl"]),
    "load_format": st.sampled_from(["auto", "dummy"]),
    "seed": st.integers(0, 2**64 - 1),
    "revision": st.none() | st.just("main"),
    "tokenizer": st.none() | st.just("org/other"),
    **{name: st.none() | st.integers(1, 2**20) for name in ARCHITECTURE_KEYS if name in COUNTS},
    "head_dim": st.none() | st.integers(1, 256).map(lambda half: 2 * half),
    "max_position": st.none() | st.integers(1000, 2**20),
    **{name: st.none() | st.floats(0, 1e9, exclude_min=True) for name in ("base", "rms_norm_epsilon", "scale")},
    **{name: st.none() | st.booleans() for name in ("qkv_bias", "ffn_bias", "tie_word_embeddings")},
}


def test_the_round_trip_covers_every_key() -> None:
    assert set(values) | {"model_name_or_path", "world_size"} == set(FIELDS)


@settings(deadline=None, max_examples=100)
@given(st.fixed_dictionaries({"model_name_or_path": st.just("m")}, optional=values))
def test_to_dict_round_trips(keys: dict[str, Any]) -> None:
    made = EngineConfig.from_dict(keys)
    assert EngineConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert made.replace() == made
    assert not {name for name, value in made.to_dict().items() if value is None} & set(ARCHITECTURE_KEYS)
    given_keys = {name: value for name, value in keys.items() if name in ARCHITECTURE_KEYS and value is not None}
    assert made.architecture == given_keys
