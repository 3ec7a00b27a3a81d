"""Fake codecs: one id per printable character, and one that only counts."""

from __future__ import annotations

from pearl.records.tokens import TokenCount, TokenIds, Tokens
from pearl.testing.tokens import FAKE_STOP, FAKE_VOCAB

_CUE = ">"
_NEWLINE = FAKE_VOCAB - 1


class FakeCodec:
    """A `Codec` of printable ASCII: ids 1 .. 95 are space .. tilde, 96 is newline, 0 stops; others become `?`."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The one stop token."""
        return (FAKE_STOP,)

    def first_prompt(self, observation: str) -> TokenIds:
        """The observation and a cue."""
        return self.encode(observation + _CUE)

    def append(self, observation: str, *, closed: bool) -> TokenIds:
        """End of the answer where needed, observation, cue."""
        text = self.encode(f"\n{observation}{_CUE}")
        return text if closed else TokenIds([FAKE_STOP]) + text

    def action(self, token_ids: Tokens) -> str:
        """Characters of a completion; a stop token at its end is left out."""
        if not isinstance(token_ids, TokenIds):
            raise TypeError(
                f"FakeCodec.action: got {type(token_ids).__name__}, want TokenIds; use CountCodec for counts"
            )
        ids = token_ids.tolist()
        if ids and ids[-1] == FAKE_STOP:
            ids.pop()
        return "".join(_character(token) for token in ids)

    def encode(self, text: str) -> TokenIds:
        """One id per character."""
        return TokenIds([_id(character) for character in text])


class CountCodec:
    """A `Codec` over token counts: as many tokens as `FakeCodec` would make."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """A stop token that is never seen: a counting engine ends a turn by its length."""
        return (FAKE_STOP,)

    def first_prompt(self, observation: str) -> TokenCount:
        """One token per character, and the cue."""
        return TokenCount(len(observation) + 1)

    def append(self, observation: str, *, closed: bool) -> TokenCount:
        """End of the answer where needed, newline, observation, cue."""
        return TokenCount(len(observation) + 2 + (not closed))

    def action(self, token_ids: Tokens) -> str:
        """How many tokens the completion has: its text is not known."""
        return f"<{len(token_ids)} tokens>"


def _id(character: str) -> int:
    if character == "\n":
        return _NEWLINE
    return ord(character) - 31 if " " <= character <= "~" else _id("?")


def _character(token: int) -> str:
    return "\n" if token == _NEWLINE else chr(token + 31) if 1 <= token < _NEWLINE else "?"
