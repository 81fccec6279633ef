"""Text that comes piece by piece: whole characters only, and joined the text of all ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.detokenizer import REPLACEMENT, Detokenizer, decode
from tritonllm.testing import tiny_tokenizer

TEXTS = ["The capital of France is Paris.", "日本語 👩‍👩‍👧 ďábelské", "a\n\n b\t", "", "\N{REPLACEMENT CHARACTER}?"]
TOKENIZER = tiny_tokenizer()


def pieces(token_ids: list[int], *, skip: bool = True, size: int = 1) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, skip)
    found = [detokenizer.add(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
    return [*found, detokenizer.add([], last=True)]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(text: str, size: int) -> None:
    assert "".join(pieces(TOKENIZER.encode(text, add_special_tokens=False), size=size)) == text


def test_a_character_of_several_tokens_comes_with_its_last() -> None:
    ids = TOKENIZER.encode("語", add_special_tokens=False)
    assert len(ids) == 3
    assert pieces(ids) == ["", "", "語", ""]


def test_no_piece_ends_inside_a_character() -> None:
    found = pieces(TOKENIZER.encode("日本語 👩‍👩‍👧", add_special_tokens=False))
    assert not any(REPLACEMENT in piece for piece in found)


def test_what_ends_inside_a_character_is_flushed_at_the_end() -> None:
    ids = TOKENIZER.encode("Tokyo 東", add_special_tokens=False)[:-1]
    found = pieces(ids)
    assert "".join(found) == TOKENIZER.decode(ids) == "Tokyo " + REPLACEMENT
    assert found[-1] == REPLACEMENT


def test_a_completion_that_begins_inside_a_character_does_not_leak_the_prompt() -> None:
    ids = TOKENIZER.encode("東京", add_special_tokens=False)[1:]
    found = pieces(ids)
    assert "".join(found) == TOKENIZER.decode(ids)
    assert found[-2].endswith("京")


def test_special_tokens_are_left_out_or_kept() -> None:
    ids = [*TOKENIZER.encode("end", add_special_tokens=False), TOKENIZER.eos_token_id]
    assert "".join(pieces(ids)) == decode(TOKENIZER, ids, True) == "end"
    assert "".join(pieces(ids, skip=False)) == decode(TOKENIZER, ids, False) == "end</s>"


@given(ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40), size=st.integers(1, 4), skip=st.booleans())
def test_any_ids_in_any_pieces_give_the_same_text(ids: list[int], size: int, skip: bool) -> None:
    assert "".join(pieces(ids, skip=skip, size=size)) == TOKENIZER.decode(ids, skip_special_tokens=skip)


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert decode(None, [1, 2], True) == ""
    assert Detokenizer(None).add([1, 2], last=True) == ""
