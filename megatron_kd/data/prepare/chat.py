"""Conversations as tokens, with a mask over what the assistant says.

Where the chat template marks the assistant's part itself ({% generation %}), transformers reports
it. Most templates do not. Then the conversation is rendered in growing prefixes: what a turn adds
to the text before it, generation prompt in place, is what the assistant has to write. That
holds only for templates whose text for a prefix is a prefix of their text, so it is checked for
every turn, and a template that rewrites earlier turns is refused.
"""

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import numpy as np

ASSISTANT_TURNS = ("all", "last")
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatRules:
    """How conversations become text; all of it is part of what the data is."""

    assistant_turns: str = "all"
    """Which assistant turns are trained: "all", or the "last" of each conversation."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables for the template, such as enable_thinking."""
    date: datetime.date = datetime.date(2024, 7, 26)
    """The day told to a template that prints today's, so that a rerun gives the same tokens."""


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
        if rules.assistant_turns not in ASSISTANT_TURNS:
            raise ValueError(f"assistant turns must be all or last, got {rules.assistant_turns!r}")
        self.tokenizer = tokenizer
        self.rules = rules
        self.template = tokenizer.get_chat_template()
        self._marks_assistant = bool(_GENERATION_TAG.search(self.template))
        moment = datetime.datetime.combine(rules.date, datetime.time())
        self._variables = {"strftime_now": moment.strftime, **rules.template_kwargs}
        # Control tokens: those with a role and any the tokenizer keeps whole as special.
        added = tokenizer.added_tokens_decoder.values()
        self._control = {str(t) for t in tokenizer.all_special_tokens}
        self._control |= {token.content for token in added if token.special}
        # White space after the mark that ends a turn is the template's, not the assistant's.
        ends = "|".join(map(re.escape, sorted(self._control)))
        self._turn_end = re.compile(f"({ends})\\s+\\Z")

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
        messages = _checked_messages(messages)
        self._refuse_control_tokens(messages)
        if self._marks_assistant:
            return self._encode_marked(messages, tools)
        text = self._render(messages, tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.asarray(encoded["offset_mapping"], np.int64)
        offsets = offsets.reshape(-1, 2)  # [m, 2] characters; without tokens the list is flat
        spoken = np.zeros(len(offsets), bool)
        for start, end in self._spans(messages, tools, text):
            inside = (offsets[:, 0] >= start) & (offsets[:, 1] <= end)
            spoken |= inside & (offsets[:, 1] > offsets[:, 0])
        return np.asarray(encoded["input_ids"], np.int32), spoken

    def _encode_marked(self, messages, tools) -> tuple[np.ndarray, np.ndarray]:
        encoded = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
        spoken = np.asarray(encoded["assistant_masks"], bool)
        if self.rules.assistant_turns == "last":
            runs = np.flatnonzero(np.diff(spoken.astype(np.int8), prepend=0) == 1)
            if len(runs):
                spoken[: runs[-1]] = False
        return np.asarray(encoded["input_ids"], np.int32), spoken

    def _spans(self, messages, tools, text: str) -> list[tuple[int, int]]:
        """Character ranges of `text` that the assistant has to write."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.rules.assistant_turns == "last":
            turns = turns[-1:]
        spans = []
        for turn in turns:
            if turn == 0:
                raise ValueError("a conversation must not begin with the assistant")
            before = self._render(messages[:turn], tools, add_generation_prompt=True)
            through = self._render(messages[: turn + 1], tools)
            if not (text.startswith(before) and text.startswith(through)):
                raise ValueError(
                    f"the chat template renders turn {turn} otherwise when later turns follow (or "
                    "its generation prompt is not how it starts an assistant turn), so what the "
                    "assistant wrote cannot be told apart; use --assistant-turns last, other "
                    "--template-kwargs, or a template with {% generation %} marks"
                )
            spoken = through[len(before) :]
            if (end := self._turn_end.search(spoken)) is not None:
                spoken = spoken[: end.end(1)]
            spans.append((len(before), len(before) + len(spoken)))
        return spans

    def _render(self, messages, tools, add_generation_prompt: bool = False) -> str:
        return self._apply(
            messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _apply(self, messages, tools, **options):
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.template,
                **options,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def _refuse_control_tokens(self, messages: list[dict]) -> None:
        for message in messages:
            for text in _texts(message.get("content")):
                found = next((token for token in self._control if token in text), None)
                if found is not None:
                    raise ValueError(
                        f"a {message['role']} message holds the control token {found} as text, "
                        "which would end or open a turn; remove it"
                    )


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and "text" in part]


def _checked_messages(messages: Any) -> list[dict]:
    if not isinstance(messages, list) or not messages:
        raise ValueError('messages must be a list of {"role", "content"} objects')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError('messages must be a list of {"role", "content"} objects')
    # Columnar files fill keys a message does not have with null; templates ask whether they exist.
    return [{k: v for k, v in message.items() if v is not None} for message in messages]
