"""Messages as they come from a file, in the one form that chat templates agree on.

Templates differ in what they do with a list of content parts, with a tool call's arguments as JSON
text and with null, and most say nothing about what they cannot print. So messages are
brought into one form first, and every string in them is looked at: whatever a message
holds, a template may print.
"""

import json
from collections.abc import Iterator
from typing import Any

# What a header may print between control marks; other roles must not spell a control token.
_ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")
)


def plain_messages(messages: Any, *, arguments_as_text: bool = False) -> list[dict]:
    """Messages without nulls, contents as strings, arguments of tool calls as mappings.

    Args:
        messages: {"role", "content", …} mappings in order. Content is a string or a list of
            {"type": "text", "text"} parts, whose texts are joined. Arguments are mappings or the
            JSON text of one.
        arguments_as_text: Give arguments as JSON text instead: the text that came, if it was text.

    Raises:
        ValueError: Something in them has another form.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError('messages must be a list of {"role", "content"} objects')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError('messages must be a list of {"role", "content"} objects')
    return [_plain(message, arguments_as_text) for message in messages]


def _plain(message: dict, arguments_as_text: bool) -> dict:
    # Columnar files fill keys a message does not have with null; templates ask whether they exist.
    message = {key: value for key, value in message.items() if value is not None}
    if "content" in message:
        message["content"] = _joined(message["content"], message["role"])
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ValueError("tool_calls must be a list of objects")
        message["tool_calls"] = [_call(call, arguments_as_text) for call in calls]
    if isinstance(message.get("function_call"), dict):
        message["function_call"] = _call(message["function_call"], arguments_as_text)
    return message


def _joined(content: Any, role: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(
            f"the {role} message's content must be text or a list of text parts, got "
            f"{type(content).__name__}; write it as text (a tool's result as JSON text)"
        )
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"the {role} message's content has a part of type {kind}; only parts "
                '{"type": "text", "text": "…"} can become tokens'
            )
        texts.append(part["text"])
    return "".join(texts)


def _call(call: dict, arguments_as_text: bool) -> dict:
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), dict):
        call["function"] = _call(call["function"], arguments_as_text)
    if "arguments" in call:
        given = call["arguments"]
        arguments = _decoded(given) if isinstance(given, str) else given
        if not isinstance(arguments, dict):
            raise ValueError(
                "the arguments of a tool call must be a JSON object, or the text of one, got "
                f"{given!r:.80}"
            )
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        call["arguments"] = text if arguments_as_text else arguments
    return call


def _decoded(text: str) -> Any:
    def once(pairs):
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("a key comes twice")
        return dict(pairs)

    def constant(name):
        raise ValueError(f"{name} is no JSON value")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the arguments of a tool call are no JSON object: {error}, in {text!r:.80}"
        ) from error


def calls_of(messages: list[dict]) -> Iterator[dict]:
    """The mappings that hold a tool call's arguments."""
    for message in messages:
        calls = [*message.get("tool_calls", ()), message.get("function_call")]
        for call in calls:
            if isinstance(call, dict):
                function = call.get("function")
                call = function if isinstance(function, dict) else call
                if "arguments" in call:
                    yield call


def check_roles(messages: list[dict], control) -> None:
    """Refuse a role that spells a control token once a template puts its marks around it."""
    for message in messages:
        role = message["role"]
        if role not in _ROLES and any(f"<{a}{role}{a}>" in control for a in ("", "|", "｜")):
            raise ValueError(f"the role {role} spells a control token of the tokenizer; rename it")


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a value of JSON's kinds, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def check_characters(text: str, what: str) -> None:
    """Refuse text that is no Unicode text: half of a surrogate pair, as cut web text has.

    Raises:
        ValueError: Names the half and its place.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"{what} holds half of a surrogate pair, \\u{ord(half):04x} at character "
            f"{error.start}, which is no character; mend the text or leave it out"
        ) from error
