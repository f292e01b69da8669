"""Prompts for a model to answer: conversations up to the assistant's turn, or plain text."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from megatron_kd.data.prepare.chat import ChatRules, ChatTokenizer
from megatron_kd.data.prepare.documents import DocumentTokenizer, default_bos
from megatron_kd.data.prepare.records import Record


@dataclass(frozen=True)
class PromptText:
    """One prompt as it was found, and as tokens."""

    where: str
    """File and line or row, for messages."""
    tokens: np.ndarray
    """[p] int32, up to where the answer begins."""
    text: str | None = None
    """The plain text; None where it is turns."""
    messages: list[dict] | None = None
    """The turns that are answered; None where it is text."""
    tools: list[dict] | None = None


class PromptTokenizer:
    """Turns records into prompts, as `megatron-kd prepare` turns them into documents.

    Args:
        tokenizer: A fast transformers tokenizer.
        bos: Token put before each text; "auto" adds one if the tokenizer does, None adds none.
        rules: How conversations are rendered.

    Raises:
        ValueError: `bos` is no token of the vocabulary.
    """

    def __init__(self, tokenizer, *, bos: str | None, rules: ChatRules):
        bos = default_bos(tokenizer) if bos == "auto" else bos
        # The last turn is the only one that was not there before.
        self._rules = replace(rules, assistant_turns="last")
        self._tokenizer = tokenizer
        self._documents = DocumentTokenizer(tokenizer, bos=bos, eos=None, chat=self._rules)
        self.chat: ChatTokenizer | None = None

    def prompts(
        self, records: Iterable[Record], *, skip_invalid: Callable[[str], None] | None = None
    ) -> Iterator[PromptText]:
        """Prompts in the order of their records.

        Args:
            skip_invalid: Called with the message about each record that is left out; None stops at
                the first one.

        Raises:
            ValueError: A record cannot become a prompt, and `skip_invalid` is None; or there are
                conversations and the tokenizer cannot render them.
        """
        for record in records:
            if record.kind == "messages" and self.chat is None:
                # Outside the try: a tokenizer that cannot chat is no fault of a record's.
                self.chat = ChatTokenizer(self._tokenizer, self._rules)
            try:
                prompt = self._prompt(record)
                if not len(prompt.tokens):
                    raise ValueError(
                        f"{record.where}: an empty prompt gives the model nothing to begin from; "
                        "remove it"
                    )
            except ValueError as error:
                if skip_invalid is None:
                    raise
                skip_invalid(str(error))
            else:
                yield prompt

    def _prompt(self, record: Record) -> PromptText:
        if record.kind == "text":
            (document,) = self._documents.documents([record])
            return PromptText(record.where, document.tokens, text=record.values["text"])
        if record.kind != "messages":
            raise ValueError(
                f"{record.where}: a prompt must be text or messages, got {record.kind}"
            )
        try:
            turns, tools = turns_to_answer(record.values["messages"]), record.values.get("tools")
            tokens = self.chat.prompt(turns, tools)
        except ValueError as error:
            raise ValueError(f"{record.where}: {error}") from error
        return PromptText(record.where, tokens, messages=turns, tools=tools)

    def answered(
        self, prompt: PromptText, text: str, turn: dict | None, *, is_whole: bool
    ) -> np.ndarray:
        """An answer that came as words, as the tokens that follow the prompt's: [m] int32.

        Args:
            turn: The assistant's turn, where the prompt is turns.
            is_whole: Whether the answer is over; if so it gets the token that ends it.

        Raises:
            ValueError: The answer cannot be rendered so that it follows the prompt.
        """
        if prompt.messages is None or not is_whole:
            core = self._tokenizer.backend_tokenizer
            earlier, core.encode_special_tokens = core.encode_special_tokens, True
            try:
                tokens = core.encode(text, add_special_tokens=False).ids
            finally:
                core.encode_special_tokens = earlier
            end = self._tokenizer.eos_token_id
            return np.asarray([*tokens, end] if is_whole and end is not None else tokens, np.int32)
        tokens, spoken = self.chat.encode([*prompt.messages, turn], prompt.tools)
        before, own = len(prompt.tokens), np.flatnonzero(spoken)
        if not np.array_equal(tokens[:before], prompt.tokens) or not len(own):
            raise ValueError(
                "the chat template renders the answer otherwise than after its generation prompt"
            )
        return tokens[before : own[-1] + 1]


def turns_to_answer(messages) -> list[dict]:
    """The turns before the last one of the assistant's, or all where another's comes last.

    Raises:
        ValueError: There are none.
    """
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError('messages must be a list of {"role", "content"} objects')
    turns = messages[:-1] if messages and messages[-1].get("role") == "assistant" else messages
    if not turns:
        raise ValueError("no turn stands before the assistant's; put the user's message there")
    return turns
