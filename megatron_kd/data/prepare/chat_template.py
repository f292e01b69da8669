"""A tokenizer's chat template: what it is told, what it marks, and what it can be given."""

import datetime
from typing import Any

import jinja2
import jinja2.meta

_PROBE = "word"
# Said before the template: transformers records no {% generation %} before the first text.
_AHEAD = "{% if true %}{{ '.' }}{% endif %}\n"
_SWITCHES = ("think", "reason", "histor")


class ChatTemplate:
    """Renders messages as text.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        variables: Further variables for the template.
        date: The day told to a template that prints today's.

    Raises:
        ValueError: The template is no Jinja template.
    """

    def __init__(self, tokenizer, variables: dict[str, Any], date: datetime.date):
        self._tokenizer = tokenizer
        self.source = tokenizer.get_chat_template()
        moment = datetime.datetime.combine(date, datetime.time())
        self._variables = {"strftime_now": moment.strftime, **variables}
        try:
            self.marks_assistant = _has_generation_tag(self.source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the tokenizer's chat template is not valid: {error}") from error
        self._takes_parts = False
        self._takes_parts = self._wants_parts()

    def render(self, messages: list[dict], tools, add_generation_prompt: bool = False, **more):
        """The text of a conversation.

        Args:
            messages: In the form of `messages.plain_messages`.
            tools: Tool descriptions for the template, if any.
            add_generation_prompt: End with what the assistant's next turn begins with.
            more: Variables of this call alone.

        Raises:
            ValueError: The template refuses the messages.
        """
        return self._apply(
            self._tokenizer.apply_chat_template,
            self._formed(messages),
            tools=tools,
            chat_template=self.source,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **{**self._variables, **more},
        )

    def render_marked(self, messages: list[dict], tools) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character ranges in it that the template marks as the assistant's.

        Raises:
            ValueError: The template refuses the messages, or its marks do not lie in order.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        (text,), (ranges,) = self._apply(
            render_jinja_template,
            conversations=[self._formed(messages)],
            tools=tools,
            chat_template=_AHEAD + self.source,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **self._variables},
        )
        ranges = [(start - 1, end - 1) for start, end in ranges]
        places = [place for pair in ranges for place in pair]
        if places != sorted(places) or (places and places[-1] > len(text) - 1):
            raise ValueError(
                "the {% generation %} marks of the chat template do not follow one another; use "
                "them where text is printed, not within a macro or a set block"
            )
        return text[1:], ranges

    def switches(self) -> list[str]:
        """Variables that may decide whether the template keeps earlier thoughts."""
        names = jinja2.meta.find_undeclared_variables(_environment().parse(self.source))
        return sorted(name for name in names if any(part in name for part in _SWITCHES))

    def _apply(self, function, *args, **options):
        try:
            return function(*args, **options)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def _formed(self, messages: list[dict]) -> list[dict]:
        if not self._takes_parts:
            return messages
        return [
            {**m, "content": [{"type": "text", "text": m["content"]}]} if m.get("content") else m
            for m in messages
        ]

    def _wants_parts(self) -> bool:
        """Whether the template prints lists of content parts and drops or refuses strings."""
        prints = []
        for content in (_PROBE, [{"type": "text", "text": _PROBE}]):
            try:
                text = self.render([{"role": "user", "content": content}], None)
                prints.append(_PROBE in text and "'text'" not in text)
            except ValueError:
                prints.append(False)
        return prints == [False, True]


def _has_generation_tag(source: str) -> bool:
    """Whether Jinja sees a {% generation %} tag: one in a comment or a raw block is text."""
    _environment().parse(source)
    before = None
    for _, kind, value in _environment().lex(source):
        if kind == "whitespace":
            continue
        if before == "block_begin" and kind == "name" and value == "generation":
            return True
        before = kind
    return False


def _environment() -> jinja2.Environment:
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
