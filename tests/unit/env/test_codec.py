"""The codec against the reference: the whole conversation through the chat template and the tokenizer at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pearl.env.codec import ChatCodec
from pearl.errors import ModelError
from pearl.records.tokens import TokenCount, TokenIds

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = [
    ("h", "i"),
    ("g", "h"),
    ("e", "r"),
    ("l", "o"),
    ("lo", "w"),
    ("low", "er"),
    ("u", "s"),
    ("us", "er"),
    ("Ċ", "Ċ"),
]


def chatml_folder(folder: Path, template: str | None = CHATML) -> Path:
    """A byte-level BPE with merges, as real checkpoints have, and a ChatML template."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
    )
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(params=["tiny", "chatml"])
def folder(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    return tiny_model if request.param == "tiny" else chatml_folder(tmp_path / "chatml")


def reference(folder: Path, messages: list[tuple[str, str]]) -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    conversation = [{"role": role, "content": content} for role, content in messages]
    encoded = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids


OBSERVATIONS = ("1-9", "higher", "lower", "a longer one, with (signs)")
ACTIONS = ("5", "7", "hello lower user")


def test_appending_gives_the_tokens_of_the_whole_conversation(folder: Path) -> None:
    codec = ChatCodec(folder)
    messages = [("user", OBSERVATIONS[0])]
    tokens = codec.first_prompt(OBSERVATIONS[0])
    assert tokens.tolist() == reference(folder, messages)
    for action, observation in zip(ACTIONS, OBSERVATIONS[1:], strict=True):
        tokens = tokens + codec.answer(action) + codec.append(observation, closed=True)
        messages += [("assistant", action), ("user", observation)]
        assert tokens.tolist() == reference(folder, messages)


def test_an_answer_that_was_cut_off_is_closed(folder: Path) -> None:
    codec = ChatCodec(folder)
    cut = codec.answer("57")[:-1]
    tokens = codec.first_prompt("1-9") + cut + codec.append("lower", closed=False)
    assert tokens.tolist() == reference(folder, [("user", "1-9"), ("assistant", "57"), ("user", "lower")])


def test_stop_tokens(folder: Path, tiny_model: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    names = tokenizer.convert_ids_to_tokens(list(ChatCodec(folder).stop_token_ids))
    assert names == (["<eos>"] if folder == tiny_model else ["<|im_end|>", "<|endoftext|>"])


def test_action_is_the_text_without_its_stop_token(folder: Path) -> None:
    codec = ChatCodec(folder)
    for text in ("5", "", "hello  lower , user"):
        answer = codec.answer(text)
        assert codec.action(answer) == text
        assert codec.action(answer[:-1]) == text
        for stop in codec.stop_token_ids:
            assert codec.action(TokenIds([*answer.tolist()[:-1], stop])) == text


def test_a_special_token_inside_an_answer_stays_visible(folder: Path) -> None:
    codec = ChatCodec(folder)
    stop = codec.stop_token_ids[0]
    five = codec.answer("5").tolist()[0]
    assert codec.action(TokenIds([five, stop, five, stop])) not in ("5", "55")


def test_surrounding_space_is_the_templates_business(tmp_path: Path) -> None:
    folder = chatml_folder(tmp_path / "chatml")
    codec = ChatCodec(folder)
    tokens = codec.first_prompt(" 1-9\n") + codec.answer("5") + codec.append("\n lower \n\n", closed=True)
    assert tokens.tolist() == reference(folder, [("user", " 1-9\n"), ("assistant", "5"), ("user", "\n lower \n\n")])


def test_a_conversation_may_contain_anything(folder: Path) -> None:
    codec = ChatCodec(folder)
    odd = "pearlDummyAnswer question {{ x }}"
    tokens = codec.first_prompt(odd) + codec.answer("5") + codec.append(odd, closed=True)
    assert tokens.tolist() == reference(folder, [("user", odd), ("assistant", "5"), ("user", odd)])


def test_counts_have_no_text(tiny_model: Path) -> None:
    with pytest.raises(TypeError, match="got TokenCount, want TokenIds"):
        ChatCodec(tiny_model).action(TokenCount(3))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% for m in messages %}{{ m['content'] }}\n\n{% endfor %}", "want a special token"),
        (
            "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}<|im_end|>{% endfor %}",
            "drops the assistant",
        ),
    ],
)
def test_templates_that_cannot_work(tmp_path: Path, template: str | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ChatCodec(chatml_folder(tmp_path / "chatml", template))


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no folder"):
        ChatCodec(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        ChatCodec(tmp_path)
