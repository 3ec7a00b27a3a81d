"""The suite accepts the fake, and finds broken codecs made from it."""

from collections.abc import Callable

import pytest

from pearl.records.tokens import TokenIds, Tokens
from pearl.testing.codec import FakeCodec
from pearl.testing.contracts.codec import CodecContract, CodecSubject


class NeverStops(FakeCodec):
    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return ()


class SaysNothing(FakeCodec):
    def first_prompt(self, observation: str) -> TokenIds:
        return self.encode(observation)


class IsDeaf(FakeCodec):
    def append(self, observation: str, *, closed: bool) -> TokenIds:
        return super().append("", closed=closed)


class Trims(FakeCodec):
    def action(self, token_ids: Tokens) -> str:
        return " ".join(super().action(token_ids).split())


class ReadsTheStopToken(FakeCodec):
    def action(self, token_ids: Tokens) -> str:
        return super().action(token_ids + TokenIds([1]))[:-1]  # type: ignore[arg-type, operator]


class LeavesAnswersOpen(FakeCodec):
    def append(self, observation: str, *, closed: bool) -> TokenIds:
        return super().append(observation, closed=True)


class ClosesWithSomethingElse(FakeCodec):
    def append(self, observation: str, *, closed: bool) -> TokenIds:
        return super().append(observation, closed=True) if closed else self.encode(f"!\n{observation}>")


class Remembers(FakeCodec):
    def __init__(self) -> None:
        self.history = ""

    def first_prompt(self, observation: str) -> TokenIds:
        self.history = observation
        return super().first_prompt(observation)

    def append(self, observation: str, *, closed: bool) -> TokenIds:
        return super().append(self.history + observation, closed=closed)


class Suite(CodecContract):
    def __init__(self, make: type[FakeCodec]) -> None:
        self.make = make
        self.made = make()

    def codec(self) -> CodecSubject:
        return CodecSubject(codec=self.made, encode=self.made.encode)


BREACHES = [
    (NeverStops, "there_is_a_stop_token"),
    (SaysNothing, "the_first_prompt_is_ready_for_the_model"),
    (IsDeaf, "prompts_differ_as_observations_do"),
    (Trims, "an_answer_is_read_back_as_it_was_written"),
    (ReadsTheStopToken, "the_stop_token_is_no_part_of_the_answer"),
    (LeavesAnswersOpen, "an_open_answer_is_closed_first"),
    (ClosesWithSomethingElse, "an_open_answer_is_closed_first"),
    (Remembers, "what_is_appended_does_not_depend_on_history"),
]


@pytest.mark.parametrize("name", sorted({name for _, name in BREACHES}))
def test_a_sound_codec_is_accepted(name: str) -> None:
    getattr(Suite(FakeCodec), f"test_{name}")()


@pytest.mark.parametrize(("broken", "name"), BREACHES)
def test_a_broken_codec_is_found(
    broken: type[FakeCodec], name: str, rejected: Callable[[Callable[[], None]], None]
) -> None:
    rejected(getattr(Suite(broken), f"test_{name}"))
