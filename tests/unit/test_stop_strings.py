"""Stop strings: the text is cut at the one that is complete first, whatever tokens and pieces it is spread over."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonllm import LLMEngine, SamplingParams
from tritonllm.engine.detokenizer import Detokenizer
from tritonllm.engine.stop_strings import StopStrings
from tritonllm.errors import RequestError

LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def pieces(text: str, stops: tuple[str, ...], sizes: list[int] | None = None, include: bool = False) -> list[str]:
    """What comes out when `text` goes in, piece by piece, and then ends."""
    cutter = StopStrings(stops, include)
    found = []
    for size in sizes or [1] * len(text):
        found.append(cutter.add(text[:size]))
        text = text[size:]
    return [*found, cutter.add(text, last=True)]


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """By definition: the first end of a stop string, and of those that end there the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


class TestStopStrings:
    @given(text=LETTERS, stops=STOPS, sizes=st.lists(st.integers(0, 5), max_size=12))
    def test_any_pieces_give_the_text_that_the_rule_gives(self, text: str, stops: tuple, sizes: list[int]) -> None:
        expected, stop = cut(text, stops)
        assert "".join(pieces(text, stops, sizes)) == expected
        assert "".join(pieces(text, stops, sizes, include=True)) == expected + (stop or "")

    @given(text=LETTERS, stops=STOPS)
    def test_nothing_is_held_back_that_cannot_begin_a_stop_string(self, text: str, stops: tuple[str, ...]) -> None:
        cutter, out = StopStrings(stops), ""
        for end in range(1, len(text) + 1):
            out += cutter.add(text[end - 1])
            held = text[len(out) : end]
            if cutter.found is not None:
                return
            assert held == "" or any(stop.startswith(held) for stop in stops)

    @pytest.mark.parametrize(
        ("stops", "expected", "found"),
        [
            (("own fox",), "The quick br", "own fox"),
            (("quick", "The quick"), "", "The quick"),
            (("ick brown", "k b"), "The quic", "k b"),
            (("fox jumps",), "The quick brown fox", None),
            (("fox",), "The quick brown ", "fox"),
            (("T",), "", "T"),
        ],
    )
    @pytest.mark.parametrize("size", [1, 2, 3, 19])
    def test_a_sentence(self, stops: tuple[str, ...], expected: str, found: str | None, size: int) -> None:
        cutter = StopStrings(stops)
        text = "The quick brown fox"
        out = [cutter.add(text[start : start + size]) for start in range(0, len(text), size)]
        assert "".join(out) + cutter.add("", last=True) == expected
        assert cutter.found == found

    def test_one_that_is_complete_too_early_does_not_count(self) -> None:
        cutter = StopStrings(("ab", "xabx"))
        assert [cutter.add("abxa", may_stop=False), cutter.add("b", may_stop=False)] == ["ab", ""]
        assert (cutter.add("yab"), cutter.found) == ("xaby", "ab")
        cutter = StopStrings(("ab", "xabx"))
        assert (cutter.add("xa", may_stop=False), cutter.add("bx"), cutter.found) == ("", "x", "ab")

    def test_nothing_comes_after_the_stop_string(self) -> None:
        cutter = StopStrings(("b",))
        assert [cutter.add("abc"), cutter.add("abc"), cutter.add("x", last=True)] == ["a", "", ""]


PROMPT = [3, 50]
FREE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def with_stop(*stops: str, **changes) -> SamplingParams:
    return dataclasses.replace(FREE, stop=stops, **changes)


@pytest.fixture
def free(engine) -> tuple[list[int], str]:
    """Token ids and text without a stop string."""
    result = engine.generate([PROMPT], FREE)
    return result["token_ids"][0], result["text"][0]


def expected_tokens(engine: LLMEngine, tokens: list[int], stop: str) -> list[int]:
    """The fewest first tokens whose whole characters have the stop string."""
    detokenizer, text = Detokenizer(engine.tokenizer), ""
    for index, token in enumerate(tokens):
        text += detokenizer.add([token])
        if stop in text:
            return tokens[: index + 1]
    raise AssertionError(f"{stop!r} does not occur")


class TestInTheEngine:
    @pytest.mark.parametrize("start", [0, 3, 9])
    @pytest.mark.parametrize("length", [1, 4, 9])
    def test_generate_stream_and_step_cut_alike(self, engine, free, start: int, length: int) -> None:
        tokens, text = free
        stop = text[start : start + length]
        before = text[: text.index(stop)]
        ids = expected_tokens(engine, tokens, stop)
        result = engine.generate([PROMPT], with_stop(stop))
        assert (result["text"], result["token_ids"]) == ([before], [ids])
        assert (result["finish_reason"], result["stop_reason"]) == (["stop"], [stop])
        assert result["usage"][0]["completion_tokens"] == len(ids)
        streamed = list(engine.stream([PROMPT], with_stop(stop)))
        assert "".join(piece.text for piece in streamed) == before
        assert [token for piece in streamed for token in piece.token_ids] == ids
        assert [piece.finish_reason for piece in streamed] == [None] * (len(ids) - 1) + ["stop"]
        assert streamed[-1].stop_reason == stop
        engine.add_prompt(PROMPT, with_stop(stop))
        outputs = []
        while not engine.scheduler.is_finished():
            outputs += engine.step()[0]
        assert [(output.text, output.token_ids, output.stop_reason) for output in outputs] == [(before, ids, stop)]
        assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]

    def test_it_may_be_left_in_the_text(self, engine, free) -> None:
        _, text = free
        stop = text[5:9]
        params = with_stop(stop, include_stop_str_in_output=True)
        expected = text[: text.index(stop) + len(stop)]
        assert engine.generate([PROMPT], params)["text"] == [expected]
        assert "".join(piece.text for piece in engine.stream([PROMPT], params)) == expected

    def test_what_never_comes_changes_nothing_and_its_beginning_is_not_lost(self, engine, free) -> None:
        tokens, text = free
        stop = text[-2:] + "\N{SNOWMAN}"
        result = engine.generate([PROMPT], with_stop(stop))
        assert (result["text"], result["token_ids"]) == ([text], [tokens])
        assert (result["finish_reason"], result["stop_reason"]) == (["length"], [None])
        assert "".join(piece.text for piece in engine.stream([PROMPT], with_stop(stop))) == text

    def test_on_the_last_token_allowed(self, engine, free) -> None:
        tokens, text = free
        stop = text[3:6]
        ids = expected_tokens(engine, tokens, stop)
        result = engine.generate([PROMPT], with_stop(stop, max_tokens=len(ids)))
        assert (result["token_ids"], result["finish_reason"]) == ([ids], ["stop"])
        before = with_stop(stop, max_tokens=len(ids) - 1) if len(ids) > 1 else None
        if before is not None:
            assert engine.generate([PROMPT], before)["finish_reason"] == ["length"]

    def test_the_surplus_token_of_the_step_ahead_reaches_nothing(self, engine, free) -> None:
        tokens, text = free
        stop = text[3:6]
        ids = expected_tokens(engine, tokens, stop)
        seq_id = engine.add_prompt(PROMPT, with_stop(stop))
        other = engine.add_prompt([9, 9], FREE)
        found = {}
        while not engine.scheduler.is_finished():
            for output in engine.step()[0]:
                found[output.seq_id] = output
        assert found[seq_id].token_ids == ids
        assert found[other].token_ids == engine.generate([[9, 9]], FREE)["token_ids"][0]
        assert engine.stats()["free_blocks"] == engine.stats()["total_blocks"]

    def test_none_is_looked_for_before_the_least_tokens(self, engine, free) -> None:
        tokens, text = free
        stop = text[3:9]
        count = len(expected_tokens(engine, tokens, stop))
        assert text.count(stop) == 1
        cut, whole = engine.generate([PROMPT] * 2, [with_stop(stop, min_tokens=least) for least in (count - 1, count)])[
            "text"
        ]
        assert (cut, whole) == (text[: text.index(stop)], text)

    def test_neighbours_with_and_without(self, engine, free) -> None:
        _, text = free
        stops = [text[2:4], text[6:9], "\N{SNOWMAN}"]
        params = [with_stop(stop) for stop in stops] + [FREE]
        alone = [engine.generate([PROMPT], param)["text"][0] for param in params]
        assert engine.generate([PROMPT] * 4, params)["text"] == alone
        joined = [""] * 4
        for piece in engine.stream([PROMPT] * 4, params):
            joined[piece.index] += piece.text
        assert joined == alone

    def test_after_a_preemption(self, make_engine) -> None:
        engine = make_engine(max_cached_blocks=5)
        prompts = [[token] * 30 for token in (5, 6)]
        longer = dataclasses.replace(FREE, max_tokens=40)
        texts = engine.generate(prompts, longer)["text"]
        preemptions = engine.stats()["preemptions"]
        params = [dataclasses.replace(longer, stop=text[-6:-2]) for text in texts]
        result = engine.generate(prompts, params)
        assert engine.stats()["preemptions"] > preemptions
        assert result["text"] == [text[: text.index(param.stop[0])] for text, param in zip(texts, params, strict=True)]
        assert result["finish_reason"] == ["stop"] * 2

    def test_an_aborted_request_gives_out_what_was_held_back(self, engine, free) -> None:
        _, text = free
        seq_id = engine.add_prompt(PROMPT, with_stop(text + "\N{SNOWMAN}"))
        for _ in range(6):
            engine.step()
        engine.abort(seq_id)
        (output,) = engine.step()[0]
        assert (output.finish_reason, output.stop_reason) == ("abort", None)
        assert output.text == engine.tokenizer.decode(output.token_ids)
        assert output.text

    def test_a_stream_closed_early_is_looked_at_no_more(self, engine, free) -> None:
        stream = engine.stream([PROMPT], with_stop("\N{SNOWMAN}"))
        next(stream)
        stream.close()
        engine.generate([PROMPT], FREE)
        assert engine._loop.watched == []

    def test_they_need_a_tokenizer(self, engine) -> None:
        engine.tokenizer = None
        with pytest.raises(RequestError, match=r"prompt 0: stop=\('x',\) needs a tokenizer; use stop_token_ids"):
            engine.generate([PROMPT], with_stop("x"))
        assert engine.scheduler.is_finished()


class TestStopTokens:
    def test_the_reason_names_the_token_and_its_text_is_left_out(self, engine, free) -> None:
        tokens, _ = free
        stop = tokens[4]
        ids = tokens[: tokens.index(stop) + 1]
        params = dataclasses.replace(FREE, stop_token_ids=(stop,))
        result = engine.generate([PROMPT], params)
        assert (result["token_ids"], result["finish_reason"], result["stop_reason"]) == ([ids], ["stop"], [stop])
        assert result["text"] == [engine.tokenizer.decode(ids[:-1])]
        streamed = list(engine.stream([PROMPT], params))
        assert "".join(piece.text for piece in streamed) == result["text"][0]
        assert streamed[-1].stop_reason == stop
        kept = dataclasses.replace(params, include_stop_str_in_output=True)
        assert engine.generate([PROMPT], kept)["text"] == [engine.tokenizer.decode(ids)]

    def test_a_stop_string_equal_to_the_text_of_end_of_text(self, make_engine, free) -> None:
        tokens, _ = free
        eos = tokens[4]
        with pytest.warns(UserWarning, match="is not among the checkpoint's end-of-text ids"):
            engine = make_engine(eos=eos)
        name = engine.tokenizer.decode([eos])
        expected = engine.tokenizer.decode(tokens[: tokens.index(eos)])
        for changes in ({}, {"stop": name}, {"stop": name, "skip_special_tokens": False}):
            params = dataclasses.replace(FREE, ignore_eos=False, **changes)
            assert engine.generate([PROMPT], params)["text"] == [expected.partition(name)[0] if changes else expected]
