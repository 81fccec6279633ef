"""Text that comes piece by piece: whole characters only, and joined the text of all ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.detokenizer import REPLACEMENT, Detokenizer, decode
from tritonllm.testing import tiny_tokenizer

TEXTS = ["The capital of France is Paris.", "日本語 👩‍👩‍👧 ďábelské", "a\n\n b\t", "", "\N{REPLACEMENT CHARACTER}?"]
TOKENIZER = tiny_tokenizer()


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "\u2581",
    "\u2581a",
    "a",
    "b",
    "\u2581\u2581",
    ".",
    "\u2581.",
    "\N{HIRAGANA LETTER A}",
    "\N{REPLACEMENT CHARACTER}",
]


def byte_fallback_tokenizer():
    """As that of Llama 2: a mark for the space in front of a word, and a token for each byte of any other character."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


FALLBACK = byte_fallback_tokenizer()
FALLBACK_IDS = st.one_of(
    st.integers(0, len(FALLBACK) - 1),
    st.sampled_from([259 + index for index in range(len(WORDS))]),
    st.sampled_from([3 + byte for byte in "\N{GRINNING FACE}\u65e5".encode()]),
)


def pieces(token_ids: list[int], *, skip: bool = True, size: int = 1, tokenizer=TOKENIZER) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
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


@given(ids=st.lists(FALLBACK_IDS, max_size=40), size=st.integers(1, 4), skip=st.booleans())
def test_byte_tokens_in_any_pieces_give_one_text(ids: list[int], size: int, skip: bool) -> None:
    text = "".join(pieces(ids, skip=skip, size=size, tokenizer=FALLBACK))
    assert text == decode(FALLBACK, ids, skip)
    whole = FALLBACK.decode(ids, skip_special_tokens=skip)
    if REPLACEMENT not in whole:
        assert text == whole


@given(text=st.text("ab. \N{HIRAGANA LETTER A}\N{GRINNING FACE}\u65e5\u0159", max_size=20))
def test_words_with_leading_spaces_and_byte_tokens(text: str) -> None:
    ids = [
        index
        for letter in text.replace(" ", "\u2581")
        for index in ([259 + WORDS.index(letter)] if letter in WORDS else [3 + byte for byte in letter.encode()])
    ]
    found = pieces(ids, tokenizer=FALLBACK)
    assert "".join(found) == text.removeprefix(" ")  # of which the tokenizer itself drops one
    assert not any(REPLACEMENT in piece for piece in found)


def test_good_characters_beside_bytes_that_are_none_are_kept() -> None:
    ids = [3 + byte for byte in "\u65e5".encode()] + [3 + 0xFF, 261]
    assert FALLBACK.decode(ids) == REPLACEMENT * 4 + "a"
    assert "".join(pieces(ids, tokenizer=FALLBACK)) == decode(FALLBACK, ids, True) == "\u65e5" + REPLACEMENT + "a"


def test_spaces_stay_where_the_tokenizer_would_clean_them_up() -> None:
    tokenizer = byte_fallback_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = [261, 259, 264, 261]
    assert tokenizer.decode(ids) == "a.a"
    assert "".join(pieces(ids, tokenizer=tokenizer)) == decode(tokenizer, ids, True) == "a .a"


def test_bytes_without_end_are_not_held_for_ever() -> None:
    detokenizer = Detokenizer(FALLBACK)
    out = [detokenizer.add([3 + 0xFF]) for _ in range(1000)]
    assert len("".join(out)) > 900
    assert len(detokenizer._window) <= 2 * 64


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert decode(None, [1, 2], True) == ""
    assert Detokenizer(None).add([1, 2], last=True) == ""
