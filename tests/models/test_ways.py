"""One answer, many ways: chunked, batched, cached, preempted, one after another, with the graph double and without."""

from __future__ import annotations

import itertools

import pytest
import torch

from tritonllm import LLMEngine, SamplingParams
from tritonllm.testing import HEAD_SHAPES, assert_ways_agree, equality, register_way, way_engine

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2")

# One of every shape in `make test`, the product in `make test-full`.
SAMPLE = [("llama", "9/3x64"), ("qwen2", "28/4x32")]
CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow)
    for case in itertools.product(FAMILIES, HEAD_SHAPES)
]
BRIEF = [
    ("llama", "4/4x32"),
    ("mistral", "12/2x64"),
    ("qwen3", "8/1x80"),
    ("llama", "4/2x96"),
    ("qwen2", "4/2x128"),
    ("qwen3", "2/1x256"),
    ("gemma2", "4/2x32"),
    ("gemma3_text", "4/4x32"),
    ("phi3", "4/2x96"),
    ("olmo2", "9/3x64"),
]
BRIEF_WAYS = ["all in one batch", "chunks of 7", "joining in chunks of 5, eager", "prefix cache", "preempted"]


def prompts() -> list[list[int]]:
    """Of many lengths, around the size of a block; the last three share 48 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 15, 16, 17, 33)
    shared = torch.randint(2, 512, (48,), generator=generator).tolist()
    apart = [torch.randint(2, 512, (length,), generator=generator).tolist() for length in lengths]
    return apart + [shared + tail for tail in ([7], [8, 9], [])]


@pytest.mark.parametrize(("family", "heads"), CASES)
def test_every_way_gives_the_tokens_of_a_prompt_alone(tiny, family: str, heads: str) -> None:
    folder, _ = tiny(family, heads=heads)
    assert_ways_agree(folder, prompts(), 24, device="cpu")


@pytest.mark.parametrize(("family", "heads"), BRIEF)
def test_other_head_shapes_in_the_ways_that_differ_most(tiny, family: str, heads: str) -> None:
    folder, _ = tiny(family, heads=heads)
    assert_ways_agree(folder, prompts()[3:], 24, BRIEF_WAYS, device="cpu")


def test_a_window_in_every_layer_in_the_ways_that_differ_most(tiny) -> None:
    folder, _ = tiny("mistral", sliding_window=20)
    assert_ways_agree(folder, prompts()[3:], 24, BRIEF_WAYS, device="cpu")


@pytest.mark.parametrize(
    ("family", "heads"),
    [pytest.param(*case, marks=() if case[0] == "llama" else pytest.mark.slow) for case in SAMPLE],
)
def test_every_way_samples_the_same_tokens(tiny, family: str, heads: str) -> None:
    folder, _ = tiny(family, heads=heads)
    assert_ways_agree(folder, prompts(), 24, sampled=True, device="cpu")


LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


def controlled(count: int, num_tokens: int) -> list[SamplingParams]:
    """Requests of five kinds in turn, the last of them without controls; every other one is greedy."""
    kinds = (
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
        {"logit_bias": {token: 4.0 - token for token in range(9)}, "logprobs": 3, "bad_words": LETTERS},
        {"allowed_token_ids": range(0, 90, 3), "frequency_penalty": 0.5, "top_p": 0.9},
        {"min_p": 0.05, "repetition_penalty": 0.8, "logit_bias": {3: -100.0}, "bad_words": (*LETTERS, "th", "the t")},
        {"top_k": 20},
    )
    return [
        SamplingParams(
            **{"temperature": 0.9 * (index % 2), "seed": index, "max_tokens": num_tokens, "ignore_eos": True}
            | kinds[index % len(kinds)]
        )
        for index in range(count)
    ]


CONTROLLED_WAYS = [
    "all in one batch", "chunks of 7", "joining at every step", "joining in chunks of 5, eager", "streamed",
    "prefix cache", "preempted",
]  # fmt: skip


@pytest.mark.parametrize("way", [*CONTROLLED_WAYS, pytest.param("two ranks", marks=pytest.mark.slow)])
def test_every_way_gives_the_same_tokens_under_controls(tiny, way: str) -> None:
    """Counts of a sequence that was preempted, moved to another row, or cut in chunks are those of one left alone."""
    folder, _ = tiny("llama", heads="4/2x32")
    params, keys = controlled(len(prompts()), 24), {"dtype": "float32", "device": "cpu"}
    expected = equality.complete_alone(folder, prompts(), params, keys)
    equality.assert_way_agrees(way, folder, prompts(), params, keys, expected)


def test_interpreted_kernels_give_the_same_tokens_under_controls(tiny) -> None:
    folder, _ = tiny("llama", heads="4/2x32")
    params, keys, few = controlled(3, 3), {"dtype": "float32", "device": "cpu"}, [[5, 6, 7, 8, 9], [10], [11, 5]]
    expected = equality.complete_alone(folder, few, params, keys)
    equality.assert_way_agrees("interpreted kernels", folder, few, params, keys, expected)


@pytest.mark.parametrize(
    ("family", "heads", "sampled"),
    [
        ("llama", "4/2x32", False),
        *(
            pytest.param(family, heads, sampled, marks=pytest.mark.slow)
            for family, heads in (("llama", "4/2x32"), ("qwen2", "28/4x32"), ("qwen3", "8/1x80"))
            for sampled in (False, True)
            if (family, sampled) != ("llama", False)
        ),
    ],
)
def test_two_ranks_give_the_tokens_of_one(tiny, family: str, heads: str, sampled: bool) -> None:
    folder, _ = tiny(family, heads=heads)
    ways = ["two ranks", "two ranks, joining in chunks of 5"]
    assert_ways_agree(folder, prompts(), 24, ways, sampled=sampled, device="cpu")


@pytest.mark.slow  # lane interpret compares whole models with transformers, and the test above engines
@pytest.mark.parametrize(
    ("family", "heads", "sampled"),
    [
        ("llama", "4/2x32", False),
        ("qwen3", "4/2x32", True),
        *((family, "4/2x32", False) for family in FAMILIES[4:]),
        *(
            (family, heads, False)
            for family, heads in zip(itertools.cycle(FAMILIES), HEAD_SHAPES, strict=False)
            if heads != "4/2x32"
        ),
    ],
)
def test_interpreted_kernels_give_the_tokens_of_the_references(tiny, family: str, heads: str, sampled: bool) -> None:
    folder, _ = tiny(family, heads=heads)
    assert_ways_agree(folder, [[5, 6, 7, 8, 9], [10]], 2, ["interpreted kernels"], sampled=sampled, device="cpu")


def test_a_way_of_one_s_own_is_run_with_the_others_and_only_once_by_its_name(tiny, monkeypatch) -> None:
    monkeypatch.setattr(equality, "WAYS", dict(equality.WAYS))
    monkeypatch.setattr(equality, "WAYS_ON_REQUEST", set(equality.WAYS_ON_REQUEST))
    calls = []

    @register_way("backwards")
    def backwards(name_or_path, prompts, params, keys):
        calls.append(len(prompts))
        with way_engine(name_or_path, prompts, params, keys) as engine:
            return engine.generate(prompts[::-1], params[::-1])["token_ids"][::-1]

    with pytest.raises(ValueError, match="there is a way named 'backwards' already"):
        register_way("backwards")(backwards)
    register_way("never", on_request=True)(lambda *arguments: 1 / 0)
    for name in list(equality.WAYS):
        if name not in ("backwards", "never"):
            del equality.WAYS[name]
    assert_ways_agree(tiny("llama")[0], prompts()[:3], 4, device="cpu")
    assert calls == [3]


@pytest.mark.parametrize("limit", [3, 5, 8])
def test_a_shrinking_batch_gives_what_each_prompt_gives_alone(tiny, limit: int) -> None:
    folder, _ = tiny("llama")
    lengths = [5, 9, 17, 33, 2, 40, 11, 26]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    asked = prompts()
    with LLMEngine(folder, device="cpu", block_size=16, max_num_sequences=limit, max_model_length=96) as engine:
        together = engine.generate(asked, params)["token_ids"]
    with LLMEngine(folder, device="cpu", block_size=16, max_num_sequences=1, max_model_length=96) as engine:
        alone = [engine.generate(prompt, param)["token_ids"][0] for prompt, param in zip(asked, params, strict=True)]
    assert [len(tokens) for tokens in together] == lengths
    assert together == alone
