"""Bad words of requests: how strings become tokens, and completions against the rule applied token by token."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tritonllm import LLMEngine, SamplingParams
from tritonllm.engine.bad_words import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    ring_of,
    tokenize_bad_words,
)
from tritonllm.engine.control_state import ControlledRow, ControlState
from tritonllm.engine.controls import RowControls
from tritonllm.engine.plan import plan_of
from tritonllm.engine.sequence import Sequence
from tritonllm.errors import RequestError

PROMPT = [7, 3, 3, 11, 5, 9, 9, 9, 2, 40]

# One token a byte, and one for a space with the letter behind it.
LETTERS = SimpleNamespace(
    encode=lambda text, add_special_tokens: (
        [200 + ord(text[1]), *text[2:].encode()] if text[:1] == " " and text[1:] else list(text.encode())
    )
)


class TestTokens:
    def test_with_and_without_a_space_in_front(self) -> None:
        assert tokenize_bad_words(("ab", "c"), LETTERS) == ((97, 98), (297, 98), (99,), (299,))

    def test_a_space_that_is_there_is_the_one_in_front(self) -> None:
        assert tokenize_bad_words((" ab",), LETTERS) == ((297, 98),)

    def test_white_space_and_repetitions(self) -> None:
        assert tokenize_bad_words((" ", "a", "a"), LETTERS) == ((32,), (97,), (297,))
        assert tokenize_bad_words((), None) == ()

    def test_a_word_has_so_many_tokens_and_not_one_more(self) -> None:
        longest = "x" * MAX_BAD_WORD_TOKENS
        assert len(tokenize_bad_words((longest,), LETTERS)) == 2
        with pytest.raises(RequestError, match="the bad word 'x{17}' is 17 tokens; give words of 1 to 16"):
            tokenize_bad_words(("a", longest + "x"), LETTERS)

    def test_a_word_that_leaves_no_token(self) -> None:
        with pytest.raises(RequestError, match="the bad word 'a' is 0 tokens"):
            tokenize_bad_words(("a",), SimpleNamespace(encode=lambda text, add_special_tokens: []))

    def test_a_request_has_so_many_sequences_and_not_one_more(self) -> None:
        words = tuple(chr(97 + first) + chr(97 + second) for first in range(16) for second in range(16))
        assert len(tokenize_bad_words(words, LETTERS)) == MAX_BAD_WORDS
        with pytest.raises(RequestError, match="make 513 sequences of tokens, .* at most 512"):
            tokenize_bad_words((*words, " zz"), LETTERS)

    def test_a_string_that_is_no_text(self) -> None:
        with pytest.raises(RequestError, match=r"does not take the bad word '\\ud800'"):
            tokenize_bad_words(("\ud800",), LETTERS)


def test_a_ring_has_each_token_at_its_position() -> None:
    tokens = list(range(100, 140))
    assert ring_of(tokens, 0, 3) == (100, 101, 102, *[-1] * 13)
    assert ring_of(tokens, 2, 3) == (-1, -1, 102, *[-1] * 13)
    assert ring_of(tokens, 0, 37) == (*range(132, 137), *range(121, 132))
    assert ring_of(tokens, 36, 38) == (*[-1] * 4, 136, 137, *[-1] * 10)


def test_writing_a_row_leaves_others_alone() -> None:
    state = ControlState.allocate(3, 40, torch.device("cpu"))
    words = RowControls(0, 1, 0, 0, (), None, -1, ((5, 6, 7), (8,)))
    ring = tuple(range(16))
    state.write([ControlledRow(0, words, None, ring), ControlledRow(2, words, None, ring)])
    assert state.bad_words[2, :2].tolist() == [[7, 6, 5, *[-1] * 13], [8, *[-1] * 15]]
    before = [part.clone() for part in vars(state).values()]
    state.write([ControlledRow(2, words._replace(bad_words=((1,),)), None, ring[::-1])])
    for part, old in zip(vars(state).values(), before, strict=True):
        assert torch.equal(part[:2], old[:2])
    assert state.bad_words[2, 0].tolist() == [1, *[-1] * 15]
    assert state.recent[2].tolist() == [*ring[::-1]]


def completion(engine: LLMEngine, prompt: list[int], words: list[tuple[int, ...]], num_tokens: int) -> list[int]:
    """The greedy completion under the rule, every token from a prefill of all before it."""
    output: list[int] = []
    while len(output) < num_tokens:
        seq = Sequence(prompt + output, block_size=engine.config.block_size)
        seq.block_table = list(range(seq.num_blocks))
        runner = engine.runner
        x = runner.run_model(runner.prepare_prefill([seq]), is_prefill=True)[0].float().clone()
        for *others, last in words:
            if others == output[len(output) - len(others) :] and len(others) <= len(output):
                x[last] = -torch.inf
        output.append(int(x.argmax()))
    return output


def words_in_the_way(engine: LLMEngine, prompt: list[int], num_tokens: int) -> list[tuple[int, ...]]:
    """Words that forbid the completion so far again and again, of 1 to 16 tokens, each made longer by a later one."""
    words: list[tuple[int, ...]] = []
    for stop, length in ((1, 1), (3, 2), (5, 3), (num_tokens - 1, 16)):
        output = completion(engine, prompt, words, stop)
        words.append(tuple(output[max(0, stop - length) :]))
    return words


@pytest.fixture(scope="module")
def cases(llama: str) -> list[tuple[list[int], list[tuple[int, ...]], list[int]]]:
    """Prompts with their words, and the completions that are right."""
    cases = []
    with LLMEngine(llama, device="cpu", block_size=16, max_model_length=96) as engine:
        for first in (7, 20, 33):
            prompt = [first, *PROMPT]
            words = words_in_the_way(engine, prompt, 22)
            # What the end of the prompt and the first token make is not of the output.
            words += [(prompt[-1], token) for token in completion(engine, prompt, words, 1)]
            expected = completion(engine, prompt, words, 30)
            assert expected != completion(engine, prompt, [], 30)
            cases.append((prompt, words, expected))
    return cases


class TestEngine:
    """Words are given as tokens: the tiny tokenizer would make other sequences of their text."""

    @pytest.fixture
    def as_tokens(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[tuple[int, ...]]], dict[str, str]]:
        """`as_tokens(words)`: a field of `SamplingParams` that comes out as these tokens."""

        def tokenize(texts: tuple[str, ...], _: object) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(map(int, text.split())) for text in texts)

        monkeypatch.setattr("tritonllm.engine.llm_engine.tokenize_bad_words", tokenize)
        return lambda words: {"bad_words": [" ".join(map(str, word)) for word in words]}

    def params(self, fields: dict) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **fields)

    def test_alone_in_a_batch_streamed_and_from_the_prefix_cache(self, make_engine, as_tokens, cases) -> None:
        engine = make_engine()
        expected = [tokens for *_, tokens in cases]
        prompts = [prompt for prompt, *_ in cases]
        params = [self.params(as_tokens(words)) for _, words, _ in cases]
        for _ in range(2):
            alone = [
                engine.generate([prompt], one)["token_ids"][0] for prompt, one in zip(prompts, params, strict=True)
            ]
            assert alone == expected
        plain = self.params({})
        free = engine.generate([PROMPT], plain)["token_ids"]
        result = engine.generate([PROMPT, *prompts], [plain, *params])
        assert result["token_ids"] == [*free, *expected]
        streamed: list[list[int]] = [[], [], []]
        for piece in engine.stream(prompts, params):
            streamed[piece.index] += piece.token_ids
        assert streamed == expected

    def test_preempted_and_in_chunks(self, make_engine, as_tokens, cases) -> None:
        tight = make_engine(max_num_sequences=3, max_cached_blocks=6, max_num_batched_tokens=7)
        params = [self.params(as_tokens(words)) for _, words, _ in cases]
        result = tight.generate([prompt for prompt, *_ in cases], params)
        assert tight.stats()["preemptions"] > 0
        assert result["token_ids"] == [tokens for *_, tokens in cases]

    def test_every_sample_of_a_prompt(self, make_engine, as_tokens) -> None:
        engine = make_engine()
        base = {"temperature": 1.0, "seed": 4, "max_tokens": 20, "ignore_eos": True, "n": 3, "top_k": 8}
        free = engine.generate([PROMPT], SamplingParams(**base))["token_ids"][0]
        words = [tuple(tokens[4:6]) for tokens in free] + [(free[0][0],), (free[2][9],)]
        result = engine.generate([PROMPT], SamplingParams(**base, **as_tokens(words)))["token_ids"][0]
        for tokens in result:
            for word in words:
                assert word not in [tuple(tokens[i : i + len(word)]) for i in range(20)]
        assert len({*map(tuple, result)}) == 3

    def test_rows_written_anew_at_every_step(self, make_engine, as_tokens, cases) -> None:
        """Whoever schedules on their own writes a row whole, its newest token read."""
        prompt, words, expected = cases[0]
        engine = make_engine()
        seq = Sequence(prompt, self.params({}), block_size=engine.config.block_size, bad_words=tuple(words))
        seq.block_table = [0, 1, 2]
        for step in range(30):
            plan = plan_of([seq], is_prefill=step == 0, num_rows=engine.runner.max_num_rows)
            engine.runner.call("launch", plan)
            (token,) = engine.runner.collect()
            seq.num_computed_tokens = len(seq)
            seq.append_token(token)
        assert seq.completion_token_ids == expected

    def test_beside_penalties_and_biases(self, make_engine, as_tokens) -> None:
        """A forbidden token stays so whatever its bias, and words do not disturb what is counted."""
        engine = make_engine()
        base = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "frequency_penalty": 0.4, "logit_bias": {9: 30}}
        assert engine.generate([PROMPT], SamplingParams(**base))["token_ids"][0][:3] == [9, 9, 9]
        result = engine.generate([PROMPT], SamplingParams(**base, **as_tokens([(9, 9)])))["token_ids"][0]
        assert result[0::2] == [9] * 12
        assert 9 not in result[1::2]

    def test_text(self, make_engine) -> None:
        """Through the checkpoint's tokenizer: what the answer says does not come again."""
        engine = make_engine()
        params = self.params({})
        (tokens,) = engine.generate(["A token is"], params)["token_ids"]
        words = [engine.tokenizer.decode([token]).strip() for token in tokens[:12]]
        words = [word for word in words if word.isalpha()]
        assert words
        (other,) = engine.generate(["A token is"], self.params({"bad_words": words}))["token_ids"]
        bad = tokenize_bad_words(tuple(words), engine.tokenizer)
        assert any(token in tokens for (token,) in [word for word in bad if len(word) == 1])
        assert not any(word == tuple(other[i : i + len(word)]) for word in bad for i in range(len(other)))

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"bad_words": "x" * 80}, "the bad word 'x{80}' is [0-9]+ tokens; give words of 1 to 16"),
            ({"bad_words": "a", "allowed_token_ids": ["a", " a"]}, "may all be forbidden by bad_words=.*; allow a"),
            (
                {"bad_words": "a", "allowed_token_ids": ["a", " a", "b"], "stop_token_ids": ["b"], "min_tokens": 1},
                r"may all be forbidden by bad_words=\('a',\) and min_tokens=1",
            ),
        ],
    )
    def test_what_cannot_be_served_is_refused_and_nothing_queued(self, make_engine, fields: dict, message: str) -> None:
        engine = make_engine()
        for name in {"allowed_token_ids", "stop_token_ids"} & fields.keys():
            fields = {**fields, name: [engine.tokenizer.encode(t, add_special_tokens=False)[-1] for t in fields[name]]}
        with pytest.raises(RequestError, match=f"prompt 1: .*{message}"):
            engine.generate([PROMPT] * 2, [SamplingParams(), SamplingParams(**fields)])
        assert engine.scheduler.is_finished()
        assert engine.stats()["requests"] == 0

    def test_they_need_a_tokenizer(self, make_engine) -> None:
        engine = make_engine()
        engine.tokenizer = None
        with pytest.raises(RequestError, match=r"bad_words=\('a',\) needs a tokenizer; use logit_bias, or set"):
            engine.generate([PROMPT], SamplingParams(bad_words="a"))
