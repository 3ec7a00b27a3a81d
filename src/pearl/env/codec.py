"""Tokenizer and chat template of a checkpoint, as an append-only codec.

*Append-only*: the tokens of a conversation are first prompt, completion, append, completion, ...; nothing before is ever
encoded again. What goes between two completions is read off the template itself: a dummy conversation is rendered and
cut behind its answer, so any template works whose answers end with a special token (ChatML and its like).
Text of an environment is encoded as the template's own: a special token spelled out in an observation becomes that token.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pearl.errors import ModelError
from pearl.records.tokens import TokenIds, Tokens

_QUESTION = "question"
_ANSWER = "pearlDummyAnswer"
"""Not to be found in any template, and nothing that a template would trim or rewrite."""

_CACHED_TEXTS = 4096
"""Observations and actions of small environments repeat all the time; 4,096 short ones take about 2 MB."""


class ChatCodec:
    """Implements `pearl.ports.Codec` for a Hugging Face checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        """Load tokenizer and template.

        Raises:
            ModelError: no tokenizer or chat template in the folder, or the template does not end answers with a special token.
        """
        self._folder = folder
        self._tokenizer = _load(folder)
        self._end_of_turn = self._read_end_of_turn()
        eos = self._tokenizer.eos_token_id
        self._stops = tuple(dict.fromkeys((self._end_of_turn, *(() if eos is None else (int(eos),)))))
        self._first = lru_cache(_CACHED_TEXTS)(self._encode_first)
        self._between = lru_cache(_CACHED_TEXTS)(self._encode_between)
        self._answer = lru_cache(_CACHED_TEXTS)(self._encode_answer)

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
        return TokenIds(self._encode(self._render((("user", observation),))))

    def _encode_between(self, observation: str) -> TokenIds:
        return TokenIds(self._encode(self._behind_answer(observation)))

    def _encode_answer(self, text: str) -> TokenIds:
        return TokenIds([*self._encode(text), self._end_of_turn])

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
