"""Contract of `Codec`: history is never encoded again, and an answer's text is what the model wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pearl.ports import Codec
from pearl.records.tokens import TokenIds, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSubject:
    """A codec under test."""

    codec: Codec
    encode: Callable[[str], Tokens]
    """Text as a model would write it, without a stop token."""
    texts: Sequence[str] = ("guess 5", "the answer is 42.", "a  b", "x", "line\nline")
    """Each within the tokenizer's alphabet, without special tokens."""
    has_ids: bool = True
    """False: counts only."""


class CodecContract:
    """Subclass it and give `codec`."""

    def codec(self) -> CodecSubject:
        """A codec."""
        raise NotImplementedError

    def test_there_is_a_stop_token(self) -> None:
        stops = self.codec().codec.stop_token_ids
        assert stops
        assert len(set(stops)) == len(stops)

    def test_the_first_prompt_is_ready_for_the_model(self) -> None:
        subject = self.codec()
        for text in subject.texts:
            prompt = subject.codec.first_prompt(text)
            assert len(prompt) > 0
            assert subject.codec.first_prompt(text) == prompt
        assert len(subject.codec.first_prompt("")) > 0

    def test_prompts_differ_as_observations_do(self) -> None:
        subject = self.codec()
        if subject.has_ids:
            for text, other in zip(subject.texts, subject.texts[1:], strict=False):
                assert subject.codec.first_prompt(text) != subject.codec.first_prompt(other)
                assert subject.codec.append(text, closed=True) != subject.codec.append(other, closed=True)

    def test_an_answer_is_read_back_as_it_was_written(self) -> None:
        subject = self.codec()
        if subject.has_ids:
            for text in subject.texts:
                assert subject.codec.action(subject.encode(text)) == text

    def test_the_stop_token_is_no_part_of_the_answer(self) -> None:
        subject = self.codec()
        if subject.has_ids:
            for stop in subject.codec.stop_token_ids:
                for text in subject.texts:
                    assert subject.codec.action(subject.encode(text) + TokenIds([stop])) == text
                assert subject.codec.action(TokenIds([stop])) == ""

    def test_an_open_answer_is_closed_first(self) -> None:
        subject = self.codec()
        for text in subject.texts:
            closed = subject.codec.append(text, closed=True)
            opened = subject.codec.append(text, closed=False)
            extra = len(opened) - len(closed)
            assert extra >= 1
            assert opened[extra:] == closed
            if subject.has_ids:
                assert isinstance(opened, TokenIds)
                assert opened.tolist()[0] in subject.codec.stop_token_ids

    def test_what_is_appended_does_not_depend_on_history(self) -> None:
        subject = self.codec()
        before = [subject.codec.append(text, closed=True) for text in subject.texts]
        for text in reversed(subject.texts):
            subject.codec.first_prompt(text)
            subject.codec.action(subject.encode(text))
        assert [subject.codec.append(text, closed=True) for text in subject.texts] == before
