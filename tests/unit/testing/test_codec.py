import string

import pytest

from pearl.records.tokens import TokenCount, TokenIds
from pearl.testing.codec import CountCodec, FakeCodec
from pearl.testing.tokens import FAKE_VOCAB


def test_every_printable_character_has_an_id() -> None:
    text = " " + string.digits + string.ascii_letters + string.punctuation + "\n"
    ids = FakeCodec().encode(text).tolist()
    assert sorted(ids) == list(range(1, FAKE_VOCAB))
    assert FakeCodec().action(TokenIds(ids)) == text


def test_ids_are_pinned() -> None:
    assert FakeCodec().encode(" A~\n").tolist() == [1, 34, 95, 96]
    assert FakeCodec().encode("é\t").tolist() == FakeCodec().encode("??").tolist()


def test_prompts_end_with_the_cue() -> None:
    codec = FakeCodec()
    assert codec.first_prompt("hi") == codec.encode("hi>")
    assert codec.append("hi", closed=True) == codec.encode("\nhi>")
    assert codec.append("hi", closed=False) == TokenIds([0]) + codec.encode("\nhi>")


def test_one_stop_token_at_the_end_is_left_out() -> None:
    codec = FakeCodec()
    assert codec.action(TokenIds([34, 35, 0])) == "AB"
    assert codec.action(TokenIds([34, 0, 0])) == "A?"
    assert codec.action(TokenIds([97, 2000])) == "??"
    assert codec.action(TokenIds()) == ""


def test_counts_are_those_of_the_fake_codec() -> None:
    real, count = FakeCodec(), CountCodec()
    for text in ("", "x", "two words"):
        assert len(count.first_prompt(text)) == len(real.first_prompt(text))
        for closed in (True, False):
            assert len(count.append(text, closed=closed)) == len(real.append(text, closed=closed))
    assert count.action(TokenCount(7)) == "<7 tokens>"


def test_counts_have_no_text() -> None:
    with pytest.raises(TypeError, match="got TokenCount, want TokenIds; use CountCodec"):
        FakeCodec().action(TokenCount(3))
