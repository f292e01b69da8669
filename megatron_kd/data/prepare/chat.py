"""Conversations as tokens, with a mask over what the assistant says.

Where the chat template marks the assistant's part itself ({% generation %}), its marks are taken.
Most templates have none. Then the conversation is rendered in growing prefixes: what a turn adds
to the text before it, generation prompt in place, is what the assistant has to write. That
holds only for templates whose text for a prefix is a prefix of their text, so it is checked for
every turn, and a template that rewrites earlier turns is refused.
"""

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from megatron_kd.data.prepare.chat_template import ChatTemplate
from megatron_kd.data.prepare.control_tokens import PROBE, ControlTokens
from megatron_kd.data.prepare.messages import (
    calls_of,
    check_characters,
    check_roles,
    plain_messages,
    strings_in,
)
from megatron_kd.data.prepare.token_spans import (
    encode_with_offsets,
    tokens_touching,
    tokens_within,
)
from megatron_kd.files import sha256_json

ASSISTANT_TURNS = ("all", "last")


@dataclass(frozen=True)
class ChatRules:
    """How conversations become text; all of it is part of what the data is."""

    assistant_turns: str = "all"
    """Which assistant turns are trained: "all", or the "last" of each conversation."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables for the template, such as enable_thinking."""
    date: datetime.date = datetime.date(2024, 7, 26)
    """The day told to a template that prints today's, so that a rerun gives the same tokens."""

    def __post_init__(self) -> None:
        if not isinstance(self.template_kwargs, dict):
            raise ValueError(
                "--template-kwargs must be a JSON object, such as "
                f'{{"enable_thinking": false}}, got {json.dumps(self.template_kwargs)}'
            )
        if self.assistant_turns not in ASSISTANT_TURNS:
            raise ValueError(f"assistant turns must be all or last, got {self.assistant_turns!r}")


class ChatTokenizer:
    """Renders and tokenises conversations with a tokenizer's own chat template.

    Raises:
        ValueError: The tokenizer has no chat template, or gives no character offsets.
    """

    def __init__(self, tokenizer, rules: ChatRules):
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, so messages cannot be rendered; give a "
                'tokenizer with one, or prepare {"text"} or {"tokens"}'
            )
        if not tokenizer.is_fast:
            raise ValueError(
                f"{type(tokenizer).__name__} gives no character offsets; use a fast tokenizer "
                "(a directory with tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self.rules = rules
        self._template = ChatTemplate(tokenizer, rules.template_kwargs, rules.date)
        self.template = self._template.source
        self._control = ControlTokens(tokenizer, self._template)
        self.turns_without_end = 0
        """Trained turns so far that no control token ends, so that no stop is learnt."""

    def encode(self, messages: Sequence[dict], tools=None) -> tuple[np.ndarray, np.ndarray]:
        """One conversation.

        Args:
            messages: {"role", "content"} mappings in order.
            tools: Tool descriptions for the template, if any.

        Returns:
            (tokens [m] int32, spoken [m] bool): spoken marks the tokens the assistant has to write,
            its end-of-turn token among them, the role header not.

        Raises:
            ValueError: The messages are malformed, hold control tokens as text, or are refused by
                the template; or the template rewrites earlier turns.
        """
        plain, text = self._checked(messages, tools)
        if self._template.marks_assistant:
            text, spans = self._template.render_marked(plain, tools)
            spans, chosen = self._chosen(spans, plain, tools), tokens_touching
            self._count_ends(text, spans)
        else:
            text, spans = self._spans(plain, tools, text)
            chosen = tokens_within
        tokens, offsets = encode_with_offsets(self.tokenizer, text)
        spoken = np.zeros(len(tokens), bool)
        for start, end in spans:
            spoken |= chosen(offsets, start, end)
        return tokens, spoken

    def prompt(self, messages: Sequence[dict], tools=None) -> np.ndarray:
        """A conversation up to where the assistant's next turn begins: [p] int32.

        Raises:
            ValueError: As `encode`.
        """
        plain, _ = self._checked(messages, tools)
        text = self._template.render(plain, tools, add_generation_prompt=True)
        return encode_with_offsets(self.tokenizer, text)[0]

    @property
    def fingerprint(self) -> str:
        """Binds how conversations are rendered."""
        rules = asdict(self.rules)
        rules["date"] = rules["date"].isoformat()
        return sha256_json({"template": self.template, **rules})

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token that ends an assistant's turn, or opens the turn after it where nothing else
        ends one; None where no control token does."""
        talk = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        text = self._template.render(talk, None)
        mark = self._control.leading(text[text.rindex(PROBE) + len(PROBE) :]).strip()
        mark = mark or self._next_mark(False).strip()
        return self.tokenizer.convert_tokens_to_ids(mark) if mark else None

    def _checked(self, messages: Sequence[dict], tools) -> tuple[list[dict], str]:
        """The messages in the form the template takes, and their text; refused where they are
        malformed or hold control tokens as text."""
        plain = plain_messages(messages)
        if tools is not None and not (
            isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        ):
            raise ValueError(f"tools must be a list of objects, got {tools!r:.80}")
        check_roles(plain, self._control.names)
        self._check_strings(plain, tools)
        return self._rendered(messages, plain, tools)

    def _check_strings(self, messages: list[dict], tools) -> None:
        for what, value in [*((f"a {m['role']} message", m) for m in messages), ("tools", tools)]:
            for text in strings_in(value):
                check_characters(text, what)
                if (found := self._control.find(text)) is not None:
                    raise ValueError(
                        f"{what} holds the control token {found} as text, which would end or open "
                        "a turn; remove it"
                    )

    def _rendered(self, given, plain: list[dict], tools) -> tuple[list[dict], str]:
        """The messages in the form the template takes, and their text.

        Most templates print a mapping of arguments as JSON. Some add it to text (DeepSeek's), which
        is a TypeError, or print it as Python does: they get the JSON text. Some ask
        whether the content of a message with tool calls is null, and fail where it is not there.
        """
        calls = [call for call in calls_of(plain) if call["arguments"]]
        forms = [plain]
        if any("tool_calls" in m or "function_call" in m for m in plain):
            forms.append(plain_messages(given, arguments_as_text=True))
            forms += [[_null_content(message) for message in form] for form in forms]
        refusal = None
        for number, form in enumerate(forms):
            try:
                text = self._template.render(form, tools)
            except ValueError as error:
                refusal = refusal or error
                continue
            unprinted = [c["name"] for c in calls_of(form) if str(c.get("name", "")) not in text]
            if unprinted:
                raise ValueError(f"the chat template does not print the tool call {unprinted[0]}")
            if number % 2 == 0:
                printed = [call["arguments"] for call in calls]
                python = [str(p) for p in printed if str(p) != json.dumps(p)]
                if not any(text.count(p) > _count(p, form) for p in python):
                    return form, text
            elif all(text.count(a) >= _count(a, form) for a in map(_arguments, calls_of(form))):
                return form, text
            refusal = ValueError(
                "the chat template prints the arguments of a tool call otherwise than as JSON"
            )
        raise refusal

    def _chosen(self, spans, messages, tools) -> list[tuple[int, int]]:
        """The marked ranges that are trained."""
        if self.rules.assistant_turns == "all":
            return spans
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=0)
        try:
            earlier = len(self._template.render_marked(messages[:last], tools)[1]) if last else 0
        except ValueError:
            earlier = len(spans) - 1
        return spans[min(earlier, max(len(spans) - 1, 0)) :]

    def _count_ends(self, text: str, spans) -> None:
        for start, end in spans:
            following = text[end:]
            if self._control.end(text[start:end]) is None and (
                not following.strip() or self._control.leading(following)
            ):
                self.turns_without_end += 1

    def _spans(self, messages, tools, text: str) -> tuple[str, list[tuple[int, int]]]:
        """The text, ended where its last turn is not, and the ranges of it that the assistant has
        to write.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.rules.assistant_turns == "last":
            turns = turns[-1:]
        spans = []
        for turn in turns:
            if turn == 0:
                raise ValueError(
                    "a conversation must not begin with the assistant: nothing asks for its turn; "
                    "put a user's message before it, or use a template with {% generation %} marks"
                )
            added = self._added(messages, tools, text, turn)
            if added is None:
                raise ValueError(
                    f"the chat template renders turn {turn} otherwise when later turns follow (or "
                    "its generation prompt is not how it starts an assistant turn), so what the "
                    f"assistant wrote cannot be told apart; {self._remedy(messages, tools)}"
                )
            start, end = added
            ended = self._control.end(text[start:end])
            if ended is not None:
                spans.append((start, start + ended))
                continue
            # The mark that ends this turn opens the next one, as GLM-4's <|user|> does.
            if not text[end:].strip() and turn == len(messages) - 1:
                text = text[:end] + self._next_mark("tool_calls" in messages[turn])
            mark = self._control.leading(text[end:])
            self.turns_without_end += not mark
            spans.append((start, end + len(mark)))
        return text, spans

    def _added(self, messages, tools, text: str, turn: int, **more) -> tuple[int, int] | None:
        """The range of the text that a turn adds; None where prefixes are none of it."""
        before = self._template.render(messages[:turn], tools, add_generation_prompt=True, **more)
        through = self._template.render(messages[: turn + 1], tools, **more)
        if not (text.startswith(through) and through.startswith(before)):
            return None
        return len(before), len(through)

    def _next_mark(self, after_calls: bool) -> str:
        """What follows an assistant's turn once another turn does, if it is a control token."""
        return self._marks[after_calls]

    @cached_property
    def _marks(self) -> tuple[str, str]:
        asked, answered = ({"role": r, "content": "word"} for r in ("user", "assistant"))
        name = {"name": "word", "arguments": {}}
        call = {"id": "callword1", "type": "function", "function": name}
        result = {"role": "tool", "content": "word", "name": "word", "tool_call_id": "callword1"}
        calling = {"role": "assistant", "content": "word", "tool_calls": [call]}
        marks = []
        for talk in ([asked, answered, asked], [asked, calling, result]):
            try:
                through = self._template.render(talk[:2], None)
                text = self._template.render(talk, None)
            except ValueError:
                text = through = ""
            follows = text[len(through) :] if text.startswith(through) else ""
            marks.append(self._control.leading(follows))
        return tuple(marks)

    def _remedy(self, messages, tools) -> str:
        """What to do about a template that rewrites turns: what helps this conversation here."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        tried = [({}, turns[-1:])] if self.rules.assistant_turns == "all" else []
        wanted = turns if self.rules.assistant_turns == "all" else turns[-1:]
        for name in self._template.switches():
            tried += [({name: value}, wanted) for value in (False, True)]
        for variables, some in tried:
            try:
                text = self._template.render(messages, tools, **variables)
                helps = all(self._added(messages, tools, text, t, **variables) for t in some)
            except ValueError:
                helps = False
            if helps:
                option = (
                    f"--template-kwargs '{json.dumps(variables)}'"
                    if variables
                    else "--assistant-turns last"
                )
                return f"use {option}, or a template with {{% generation %}} marks"
        return "use a template with {% generation %} marks"


def _count(text: str, messages: list[dict]) -> int:
    return sum(string.count(text) for string in strings_in(messages))


def _arguments(call: dict) -> Any:
    return call["arguments"]


def _null_content(message: dict) -> dict:
    if "tool_calls" in message and "content" not in message:
        return {**message, "content": None}
    return message
