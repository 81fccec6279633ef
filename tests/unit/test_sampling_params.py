"""`SamplingParams` says at construction what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from tritonllm.errors import RequestError
from tritonllm.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (1.0, 64, False)
    assert (params.top_p, params.top_k, params.seed) == (1.0, 0, None)
    assert (params.max_model_length, params.skip_special_tokens, params.stop_token_ids) == (None, True, ())
    assert (params.stop, params.include_stop_str_in_output) == ((), False)


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("temperature", "finite number >= 0", [-1, -1e-9, NAN, INF, -INF, "0.7", None, True, 1e39, 10**400]),
        ("max_tokens", "integer >= 1, or None", [0, -1, 1.5, 1.0, "5", True, NAN]),
        ("ignore_eos", "True or False", [1, 0, None, "no"]),
        ("top_p", "finite number >= 0 and <= 1", [-0.1, 1.0001, 1.5, NAN, INF, "1", None, True]),
        ("top_k", "integer from -1 to 2147483647", [-2, 2.5, 1.0, True, None, "1", 2**31]),
        ("min_p", "finite number >= 0 and <= 1", [-0.1, 1.01, NAN, "1", None, True]),
        ("repetition_penalty", "finite number >= 0.01 and <= 100", [0, -1, 101, NAN, INF, None, True]),
        ("presence_penalty", "finite number >= -2 and <= 2", [-2.1, 2.1, NAN, "1", None, True]),
        ("frequency_penalty", "finite number >= -2 and <= 2", [-2.1, 2.1, NAN, "1", None, True]),
        (
            "logit_bias",
            "mapping from token ids to finite numbers >= -100 and <= 100",
            [{-1: 0}, {1: 101}, {1: NAN}, {1: "2"}, {True: 1}, {1.0: 1}, {"1": 1}, [1], [(1, 2, 3)], [(1, 2)] * 2, 5],
        ),
        (
            "allowed_token_ids",
            "sequence of at least one integer from 0 to 2147483647, or None",
            [(), [], [-1], [True], "ab", 5, (2**31,), range(0)],
        ),
        ("min_tokens", "integer >= 0", [-1, 1.5, True, None, "1"]),
        ("logprobs", "integer from 0 to 20, or None", [-1, 21, 1.0, True, "1"]),
        ("prompt_logprobs", "integer from 0 to 20, or None", [-1, 21, 1.0, True, "1"]),
        ("seed", "integer from 0 to 18446744073709551615, or None", [-1, 2**64, 1.0, True, "1"]),
        ("max_model_length", "integer >= 1, or None", [0, -1, 1.5, True, "8"]),
        ("skip_special_tokens", "True or False", [1, None, "yes"]),
        ("stop_token_ids", "integer from 0", [(-1,), [True], (1.0,), ["a"], 5, None, "ab", (2**31,)]),
        ("stop", "a non-empty string or several", ["", ("",), ["a", ""], [1], (None,), None, 5, True, b"a", {"a": 1}]),
        ("stop", "in Unicode", ["\ud83d", ["a", "b\ude00"]]),
        ("bad_words", "a non-empty string or several", ["", [""], ["a", ""], [1], (None,), None, 5, True, b"a"]),
        ("n", "integer from 1 to 16384", [0, -1, 1.5, True, None, "1", 16_385, 10**9]),
        ("include_stop_str_in_output", "True or False", [1, None, "yes"]),
    ],
)
def test_out_of_range(field: str, allowed: str, refused: list[object]) -> None:
    for value in refused:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})  # type: ignore[arg-type]
        assert isinstance(caught.value, ValueError)
        assert str(caught.value).startswith(f"{field}=")
        assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [0, 0.0, 1e-6, 1, 0.7, 1e6]),
        ("max_tokens", [1, 2, 16, None, 10**12]),
        ("top_p", [0, 1e-9, 0.5, 1, 1.0]),
        ("top_k", [0, 1, 151936, 2**31 - 1]),
        ("seed", [0, 2**64 - 1, None]),
        ("min_p", [0, 1e-9, 1]),
        ("repetition_penalty", [0.01, 1, 1.1, 100]),
        ("presence_penalty", [-2, 0, 2.0]),
        ("frequency_penalty", [-2, 0, 2.0]),
        ("logit_bias", [(), ((3, 1.5), (2**31 - 1, -100))]),
        ("allowed_token_ids", [None, (0,), (5, 5, 2)]),
        ("min_tokens", [0, 1, 64]),
        ("logprobs", [None, 0, 20]),
        ("prompt_logprobs", [None, 0, 20]),
        ("max_model_length", [1, 4096, None]),
        ("n", [1, 16_384]),
    ],
)
def test_edges_are_kept_as_given(field: str, values: list[object]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value  # type: ignore[arg-type]


def test_values_with_one_meaning_are_stored_as_one() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(temperature=1e-30) == SamplingParams(temperature=0)
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]
    assert SamplingParams(stop="\n") == SamplingParams(stop=["\n"]) == SamplingParams(stop=("\n",))  # type: ignore[arg-type]
    assert SamplingParams(bad_words="a b").bad_words == ("a b",)  # type: ignore[arg-type]
    assert SamplingParams(bad_words=["a", " "]).bad_words == ("a", " ")  # type: ignore[arg-type]
    assert SamplingParams(allowed_token_ids=[3, 4]).allowed_token_ids == (3, 4)  # type: ignore[arg-type]
    assert SamplingParams(allowed_token_ids=range(3)).allowed_token_ids == (0, 1, 2)  # type: ignore[arg-type]
    as_pairs = SamplingParams(logit_bias={3: 1, 4: -2.5})
    assert as_pairs.logit_bias == ((3, 1), (4, -2.5))
    assert as_pairs == SamplingParams(logit_bias=[[3, 1], [4, -2.5]])  # type: ignore[arg-type]
    assert SamplingParams(logit_bias=None) == SamplingParams(logit_bias={})  # type: ignore[arg-type]


def test_a_minimum_above_the_maximum_is_refused() -> None:
    assert SamplingParams(min_tokens=9, max_tokens=9).min_tokens == 9
    assert SamplingParams(min_tokens=10**6, max_tokens=None).max_tokens is None
    with pytest.raises(RequestError, match="min_tokens=10 is more than max_tokens=9; give at most as many"):
        SamplingParams(min_tokens=10, max_tokens=9)


def test_is_immutable_and_checked_when_changed() -> None:
    params = SamplingParams(temperature=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2  # type: ignore[misc]
    assert dataclasses.replace(params, top_k=3).temperature == 0.5
    with pytest.raises(RequestError):
        dataclasses.replace(params, top_k=-3)


class TestFromCheckpoint:
    """The sampling that a generation_config.json recommends."""

    @staticmethod
    def folder(tmp_path: Path, content: object) -> Path:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
        return tmp_path

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({}, {}),
            (
                {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
                dict(temperature=0.6, top_p=0.9, top_k=20),
            ),
            ({"temperature": 0.6}, {"temperature": 0.6}),
            ({"do_sample": False, "temperature": 0.6, "top_k": 20, "typical_p": 0.5}, {"temperature": 0}),
            (
                {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
                dict(temperature=0, repetition_penalty=1.1),
            ),
            ({"do_sample": True, "top_p": None, "top_k": 0}, {}),
            ({"max_length": 20, "max_new_tokens": 5, "eos_token_id": [1], "num_beams": 1}, {}),
        ],
    )
    def test_what_the_file_says_and_nothing_else(self, tmp_path: Path, caplog, config: dict, expected: dict) -> None:
        folder = self.folder(tmp_path, config)
        assert (
            SamplingParams.from_checkpoint(folder)
            == SamplingParams.from_checkpoint(str(folder))
            == SamplingParams(**expected)
        )
        assert caplog.messages == []

    def test_the_caller_goes_first(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, {"temperature": 0.6, "top_p": 0.9})
        params = SamplingParams.from_checkpoint(folder, temperature=0, max_tokens=5)
        assert params == SamplingParams(temperature=0, top_p=0.9, max_tokens=5)

    def test_no_file_says_nothing(self, tmp_path: Path) -> None:
        assert SamplingParams.from_checkpoint(tmp_path, seed=3) == SamplingParams(seed=3)

    def test_what_is_not_computed_is_named(self, tmp_path: Path, caplog) -> None:
        folder = self.folder(
            tmp_path, {"temperature": 0.6, "typical_p": 0.5, "eta_cutoff": 0.0, "no_repeat_ngram_size": 3}
        )
        with caplog.at_level(logging.WARNING, "tritonllm"):
            assert SamplingParams.from_checkpoint(folder) == SamplingParams(temperature=0.6)
        assert caplog.messages == [
            "the checkpoint's generation_config.json asks for typical_p=0.5, no_repeat_ngram_size=3, "
            "which is not computed here"
        ]

    def test_what_changes_the_best_token_is_named_without_sampling_too(self, tmp_path: Path, caplog) -> None:
        folder = self.folder(tmp_path, {"do_sample": False, "typical_p": 0.5, "no_repeat_ngram_size": 3})
        with caplog.at_level(logging.WARNING, "tritonllm"):
            assert SamplingParams.from_checkpoint(folder) == SamplingParams(temperature=0)
        assert [message.partition(" asks for ")[2] for message in caplog.messages] == [
            "no_repeat_ngram_size=3, which is not computed here"
        ]

    @pytest.mark.parametrize("config", [{"temperature": -1}, {"top_p": "0.9"}, ["temperature"], 5])
    def test_a_file_that_makes_no_sense(self, tmp_path: Path, config: object) -> None:
        with pytest.raises(RequestError):
            SamplingParams.from_checkpoint(self.folder(tmp_path, config))

    def test_no_json(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text("{")
        with pytest.raises(RequestError, match="generation_config.json is not readable as JSON"):
            SamplingParams.from_checkpoint(tmp_path)

    @pytest.mark.parametrize("checkpoint", ["Qwen/Qwen3-0.6B", 5, None, "no/such/folder"])
    def test_neither_an_engine_nor_a_folder(self, checkpoint: object) -> None:
        with pytest.raises(RequestError, match="give an LLMEngine, or a checkpoint's local folder"):
            SamplingParams.from_checkpoint(checkpoint)
