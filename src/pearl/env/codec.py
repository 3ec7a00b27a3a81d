"""Tokenizer and chat template of a checkpoint, as an append-only codec.

*Append-only*: the tokens of a conversation are first prompt, completion, append, completion, ...; nothing before is ever
encoded again. What goes between two completions is read off the template itself: a dummy conversation is rendered and
cut behind its answer, so any template works whose answers end with a special token (ChatML and its like).
*Unforgeable*: a special token that an observation spells out is ordinary text, unless a recipe allows it; the template's own
stay what they are. So an environment that repeats what a model or a user wrote cannot end a turn or begin another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pearl.config.recipe import Recipe
from pearl.errors import ModelError
from pearl.records.tokens import TokenIds, Tokens

_QUESTION = "question"
_ANSWER = "pearlDummyAnswer"
"""Not to be found in any template, and nothing that a template would trim or rewrite."""

_CACHED_TEXTS = 4096
"""Observations and actions of small environments repeat all the time."""
_CACHED_CHARACTERS = 256
"""A text to be kept may be this long: what repeats is short. With its tokens it takes about 2 KB, so a cache at most 10 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """What a template puts around an observation."""

    before: str
    behind: str
    special: tuple[int, ...]
    """Special tokens in both, in order."""


class ChatCodec:
    """Implements `pearl.ports.Codec` for a Hugging Face checkpoint folder."""

    def __init__(self, folder: Path, *, allow_special_tokens: bool = False) -> None:
        """Load tokenizer and template.

        Raises:
            ModelError: no tokenizer or chat template in the folder, or the template does not end answers with a special token.
        """
        self._folder = folder
        self._allow_special_tokens = allow_special_tokens
        self._tokenizer = _load(folder)
        self._end_of_turn = self._read_end_of_turn()
        eos = self._tokenizer.eos_token_id
        self._stops = tuple(dict.fromkeys((self._end_of_turn, *(() if eos is None else (int(eos),)))))
        self._special = self._special_ids()
        self._first_frame = self._frame(self._render_first)
        self._between_frame = self._frame(self._behind_answer)
        self._first = _cached(self._encode_first)
        self._between = _cached(self._encode_between)
        self._answer = _cached(self._encode_answer)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The template's end of an answer, then the tokenizer's end of text where that is another token."""
        return self._stops

    def first_prompt(self, observation: str) -> TokenIds:
        """Return the conversation's beginning with the cue to answer."""
        return self._first(observation)

    def append(self, observation: str, *, closed: bool) -> TokenIds:
        """Return what follows a completion: end of answer unless `closed`, observation, cue."""
        between = self._between(observation)
        return between[1:] if closed else between

    def action(self, token_ids: Tokens) -> str:
        """Return the text of a completion without its stop token; other special tokens stay visible."""
        ids = _ids(token_ids)
        if ids and ids[-1] in self._stops:
            ids = ids[:-1]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def answer(self, text: str) -> TokenIds:
        """Return a scripted completion: the tokens of `text`, then the end of an answer."""
        return self._answer(text)

    def _encode_first(self, observation: str) -> TokenIds:
        return TokenIds(self._encode_framed(self._render_first(observation), observation, self._first_frame))

    def _encode_between(self, observation: str) -> TokenIds:
        return TokenIds(self._encode_framed(self._behind_answer(observation), observation, self._between_frame))

    def _encode_answer(self, text: str) -> TokenIds:
        return TokenIds([*self._encode(text), self._end_of_turn])

    def _render_first(self, observation: str) -> str:
        return self._render((("user", observation),))

    def _behind_answer(self, observation: str) -> str:
        text = self._render((("user", _QUESTION), ("assistant", _ANSWER), ("user", observation)))
        _, found, behind = text.partition(_ANSWER)
        if not found:
            raise ModelError(
                f"{self._folder}: chat template: it drops the assistant's message, want it rendered verbatim"
            )
        return behind

    def _read_end_of_turn(self) -> int:
        behind = self._encode(self._behind_answer(_QUESTION))
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        if not behind or behind[0] not in special:
            got = self._tokenizer.decode(behind[:4])
            raise ModelError(
                f"{self._folder}: chat template: an assistant's message ends with {got!r}, want a special token "
                "such as <|im_end|>, so that the model can end its turn"
            )
        return behind[0]

    def _render(self, messages: tuple[tuple[str, str], ...]) -> str:
        conversation = [{"role": role, "content": content} for role, content in messages]
        text: str = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _special_ids(self) -> frozenset[int]:
        """Tokens that an observation must not spell out; an unknown character is none of them."""
        added = self._tokenizer.added_tokens_decoder
        special = {*self._tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        special.discard(self._tokenizer.unk_token_id)
        used = (*self._encode(self._render_first(_QUESTION)), *self._encode(self._behind_answer(_QUESTION)))
        return frozenset(special.union(self._stops, (token for token in used if token in added)))

    def _frame(self, render: Callable[[str], str]) -> _Frame:
        text = render(_ANSWER)
        before, _, behind = text.partition(_ANSWER)
        return _Frame(before=before, behind=behind, special=self._special_of(self._encode(text)))

    def _special_of(self, ids: list[int]) -> tuple[int, ...]:
        return tuple(token for token in ids if token in self._special)

    def _encode_framed(self, rendered: str, observation: str, frame: _Frame) -> list[int]:
        """Encode an observation in its frame; only the frame holds special tokens."""
        ids = self._encode(rendered)
        if self._allow_special_tokens or self._special_of(ids) == frame.special:
            return ids
        if rendered.startswith(frame.before) and rendered.endswith(frame.behind):
            # As the template has it: it may have trimmed it.
            observation = rendered[len(frame.before) : len(rendered) - len(frame.behind)]
        return [*self._encode(frame.before), *self._encode_plain(observation), *self._encode(frame.behind)]

    def _encode_plain(self, text: str) -> list[int]:
        """Encode a text as ordinary text, whatever it spells out."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if not self._special_of(ids):
            return ids
        # A template may use tokens that its tokenizer does not call special, and so does not split.
        return [token for character in text for token in self._encode(character) if token not in self._special]


def codec_of(recipe: Recipe) -> ChatCodec:
    """Return the codec of a recipe.

    Raises:
        ModelError: see `ChatCodec`.
    """
    return ChatCodec(recipe.model.path, allow_special_tokens=recipe.environment.allow_special_tokens)


def _cached(encode: Callable[[str], TokenIds]) -> Callable[[str], TokenIds]:
    kept = lru_cache(_CACHED_TEXTS)(encode)
    return lambda text: kept(text) if len(text) <= _CACHED_CHARACTERS else encode(text)


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise ModelError(f"model.path: no folder {folder}; want a Hugging Face checkpoint with tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path: {folder}: the tokenizer cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"model.path: {folder}: the tokenizer has no chat template; add chat_template.jinja")
    return tokenizer


def _ids(token_ids: Tokens) -> list[int]:
    if not isinstance(token_ids, TokenIds):
        raise TypeError(f"ChatCodec.action: got {type(token_ids).__name__}, want TokenIds")
    return token_ids.tolist()
