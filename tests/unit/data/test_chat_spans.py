"""Which tokens of a conversation are trained, for every kind of tokenizer.

The truth is taken from no offsets: control tokens divide a text into parts, each of them tokenised
by itself, so what follows <|assistant|> has the tokens of the assistant's words tokenised again.
"""

import numpy as np
import pytest
from tiny_tokenizers import KINDS, tiny_tokenizer

from megatron_kd.data.prepare.chat import ChatRules, ChatTokenizer
from megatron_kd.data.prepare.token_spans import tokens_touching, tokens_within

TURNS = "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
PLAIN = TURNS + "{{ m.content + '<|end|>' }}" + PROMPT
NEWLINES = TURNS + "{{ m.content + '<|end|>\n' }}" + PROMPT
MARKED = (
    TURNS
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}"
    + "{% else %}{{ m.content + '<|end|>' }}{% endif %}"
    + PROMPT
)
# The next turn's mark ends the assistant's, as in GLM-4; the last turn is followed by nothing.
OPEN = TURNS + "{{ m.content }}" + PROMPT
PIECES = (
    *("    ", "  ", " ", "\n", "\t", "\n\n", "\r\n"),
    *("def main():", "return", "Hello", "é", "東京", "🙂🙂", "e\u0301", "x", "4.", "🏳️‍🌈", "\u00a0"),
)


def chat(tokenizer, template, **rules):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", template)
        return ChatTokenizer(tokenizer, ChatRules(**rules))


def words(random):
    return "".join(random.choice(PIECES, int(random.integers(1, 7))))


def talk(random):
    asked = ("user", "assistant") * int(random.integers(1, 4))
    return [{"role": role, "content": words(random)} for role in asked]


def own_tokens(tokenizer, talk, end="<|end|>"):
    """(all tokens, which of them the assistant wrote), part by part."""
    tokens, spoken = [], []
    for number, message in enumerate(talk):
        header = f"<|{message['role']}|>"
        own = end or ("<|user|>" if message["role"] == "assistant" else "<|assistant|>")
        part = tokenizer(header + message["content"] + own, add_special_tokens=False).input_ids
        if number and not end:  # the header ended the turn before it
            part = part[1:]
            tokens, spoken = (
                [*tokens, *part],
                [*spoken, *[message["role"] == "assistant"] * len(part)],
            )
        else:
            tokens += part
            spoken += [False] + [message["role"] == "assistant"] * (len(part) - 1)
    return tokens, spoken


@pytest.mark.parametrize("template", [PLAIN, MARKED, OPEN], ids=["plain", "marked", "open"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_of_an_answer_and_no_other(kind, template):
    tokenizer = tiny_tokenizer(kind)
    encoder = chat(tokenizer, template)
    random = np.random.default_rng(KINDS.index(kind))
    for _ in range(60):
        messages = talk(random)
        tokens, spoken = encoder.encode(messages)
        expected = own_tokens(tokenizer, messages, "" if template == OPEN else "<|end|>")
        assert tokens.tolist() == expected[0], messages
        assert spoken.tolist() == expected[1], messages
    assert encoder.turns_without_end == 0


@pytest.mark.parametrize("turns", ["all", "last"])
def test_an_end_mark_that_swallows_white_space_is_trained(turns):
    tokenizer = tiny_tokenizer("byte-level", swallows_space=True)
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": " x"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "4."},
    ]
    tokens, spoken = chat(tokenizer, NEWLINES, assistant_turns=turns).encode(messages)
    answers = " x<|end|>4.<|end|>" if turns == "all" else "4.<|end|>"
    assert tokenizer.decode(tokens[spoken]) == answers


def test_a_last_turn_that_calls_a_tool_ends_where_the_tool_answers():
    tokenizer = tiny_tokenizer("byte-level")
    template = (
        "{% for m in messages %}"
        "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}"
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}" + PROMPT
    )
    call = {"function": {"name": "main", "arguments": {}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "x", "tool_calls": [call]},
    ]
    tokens, spoken = chat(tokenizer, template).encode(messages)
    assert tokenizer.decode(tokens[spoken]) == "xmain<|observation|>"


def test_turns_that_nothing_ends_are_counted():
    tokenizer = tiny_tokenizer("byte-level")
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    encoder = chat(tokenizer, template)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}] * 2
    tokens, spoken = encoder.encode(messages)
    assert tokenizer.decode(tokens[spoken]) == " x\n x\n"
    assert encoder.turns_without_end == 2
    unended = MARKED.replace("{{ m.content + '<|end|>' }}{% endg", "{{ m.content }}{% endg")
    encoder = chat(tokenizer, unended)
    encoder.encode(messages)
    assert encoder.turns_without_end == 2


def test_marks_count_from_the_first_turn_and_touching_turns_are_two():
    tokenizer = tiny_tokenizer("byte-level")
    first = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    messages = [{"role": "assistant", "content": "Hello"}, {"role": "assistant", "content": "4."}]
    tokens, spoken = chat(tokenizer, first).encode(messages)
    assert spoken.all() and tokenizer.decode(tokens) == "Hello4."
    tokens, spoken = chat(tokenizer, first, assistant_turns="last").encode(messages)
    assert tokenizer.decode(tokens[spoken]) == "4."
    more = "x{% endgeneration %}{% generation %}{{ m.content }}{%"
    twice = first.replace("{{ m.content }}{%", more)
    tokens, spoken = chat(tokenizer, twice, assistant_turns="last").encode(messages)
    assert tokenizer.decode(tokens[spoken]) == "x4."


def test_a_generation_tag_in_a_comment_is_no_mark():
    tokenizer = tiny_tokenizer("byte-level")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Hello"}]
    tokens, spoken = chat(tokenizer, "{# {% generation %} #}" + PLAIN).encode(messages)
    assert tokenizer.decode(tokens[spoken]) == "Hello<|end|>"


@pytest.mark.parametrize("kind", ["byte-level", "byte-level trimmed"])
def test_white_space_that_ends_a_marked_answer_is_trained(kind):
    tokenizer = tiny_tokenizer(kind)
    unended = MARKED.replace("{{ m.content + '<|end|>' }}{% endg", "{{ m.content }}{% endg")
    messages = [{"role": "assistant", "content": "4.  "}, {"role": "user", "content": " x"}]
    tokens, spoken = chat(tokenizer, unended).encode(messages)
    assert tokenizer.decode(tokens[spoken]) == "4.  "


def test_tokens_without_characters_count_where_they_lie():
    offsets = np.array([[0, 2], [2, 2], [2, 4], [4, 4], [4, 6]])
    assert tokens_within(offsets, 2, 4).tolist() == [False, True, True, False, False]
    assert tokens_within(offsets, 1, 5).tolist() == [False, True, True, True, False]
    assert tokens_touching(offsets, 1, 4).tolist() == [True, True, True, False, False]
    assert not tokens_touching(offsets, 1, 1).any()


def test_the_tokenizer_is_left_as_it_was():
    tokenizer = tiny_tokenizer("byte-level trimmed")
    chat(tokenizer, PLAIN).encode([{"role": "user", "content": "x"}])
    encoded = tokenizer("x  x", return_offsets_mapping=True)
    assert (2, 2) in encoded["offset_mapping"]
