"""Streamed text: whole characters only, nothing behind or of a stop string, and in the end the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import build_byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from trainer.text_stream import TextStream

MARK = "\ufffd"
BYTES = build_byte_tokenizer()


def byte_decode(ids: Sequence[int]) -> str:
    return str(BYTES.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def sentencepiece() -> Tokenizer:
    """Like Llama 2 and Gemma: words with a mark for the space before them, and one token per byte for the rest."""
    words = ["<unk>", "▁", "▁the", "▁end", "the", "end", "n", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


SENTENCEPIECE = sentencepiece()


def pieces_of(decode: Callable[[Sequence[int]], str], ids: Sequence[int], stops: Sequence[str] = ()) -> list[str]:
    """What is sent with each token, and at the end; the completion's text is cut as a whole reply cuts it."""
    stream = TextStream(decode, stops)
    sent = [stream.push(token) for token in ids]
    text = decode(ids)
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return [*sent, stream.rest(text[: min(ends)] if ends else text)]


def ids_of(text: str) -> list[int]:
    return list(BYTES(text)["input_ids"])


def test_a_character_of_several_tokens_is_sent_as_one() -> None:
    assert len(ids_of("a€😀b")) == 1 + 3 + 4 + 1
    assert [piece for piece in pieces_of(byte_decode, ids_of("a€😀b")) if piece] == ["a", "€", "😀", "b"]


def test_the_beginning_of_a_stop_string_waits_until_it_is_none() -> None:
    assert pieces_of(byte_decode, ids_of("a##b"), ["###"]) == ["a", "", "", "##b", ""]


def test_nothing_of_a_stop_string_is_sent_and_nothing_behind_it() -> None:
    assert "".join(pieces_of(byte_decode, ids_of("one€ENDtwo"), ["€END", "no"])) == "one"
    assert [piece for piece in pieces_of(byte_decode, ids_of("one€ENDtwo"), ["€END"]) if piece] == ["o", "n", "e"]


def test_bytes_that_are_no_character_are_sent_as_the_whole_text_has_them() -> None:
    broken = [ids_of("é")[0], *ids_of("x"), ids_of("é")[1], ids_of("😀")[0], ids_of("😀")[1]]
    assert "".join(pieces_of(byte_decode, broken)) == byte_decode(broken) == f"{MARK}x{MARK}{MARK}"


def test_the_space_before_a_word_is_kept_in_the_middle_and_left_out_at_the_start() -> None:
    def decode(ids: Sequence[int]) -> str:
        return str(SENTENCEPIECE.decode(list(ids)))

    vocabulary = SENTENCEPIECE.get_vocab()
    euro = [vocabulary[f"<0x{byte:02X}>"] for byte in "€".encode()]
    ids = [vocabulary["▁the"], vocabulary["▁end"], *euro, vocabulary["▁end"], vocabulary["the"]]
    assert pieces_of(decode, ids) == ["the", " end", "", "", "€", " end", "the", ""]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 257), st.sampled_from(ids_of("ab€"))), max_size=30),
    st.lists(st.sampled_from(["a", "ab", "aab", "€", "b€", "ba"]), max_size=2),
)
def test_pieces_add_up_to_the_text_whatever_the_tokens_are(ids: list[int], stops: list[str]) -> None:
    text = byte_decode(ids)
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    pieces = pieces_of(byte_decode, ids, stops)
    assert "".join(pieces) == (text[: min(ends)] if ends else text)
