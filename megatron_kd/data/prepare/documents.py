"""Records as tokenised documents. m: tokens of one document.

`wanted[j]` says whether predicting tokens[j] is trained; where a document begins, there is nothing
before it to predict from, and only naive packing gives its first token a predecessor.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron_kd.data.prepare.chat import ChatRules, ChatTokenizer
from megatron_kd.data.prepare.control_tokens import ControlTokens
from megatron_kd.data.prepare.messages import check_characters
from megatron_kd.data.prepare.records import Record
from megatron_kd.files import sha256_json

_BATCH_RECORDS = 256
_PROBE = "Naïve  test:\n\tx = 1234.5e-6  # 東京 — don't\r\n"


@dataclass(frozen=True)
class TokenizedDocument:
    """One tokenised document."""

    kind: str
    """text, messages or tokens."""
    tokens: np.ndarray
    """[m] int32."""
    wanted: np.ndarray
    """[m] bool."""

    def digest(self) -> bytes:
        """16 bytes that are equal for documents of equal tokens."""
        return hashlib.blake2b(self.tokens.astype("<i4").tobytes(), digest_size=16).digest()


class DocumentTokenizer:
    """Turns records into documents.

    Args:
        tokenizer: A fast transformers tokenizer.
        bos: Token put before each text; None adds none.
        eos: Token put after each text; None adds none.
        chat: How conversations are rendered.

    Raises:
        ValueError: `bos` or `eos` is no token of the vocabulary.
    """

    def __init__(self, tokenizer, *, bos: str | None, eos: str | None, chat: ChatRules):
        self.tokenizer = tokenizer
        self.vocab_size = vocabulary_size(tokenizer)
        self._before = self._ids("bos", bos)
        self._after = self._ids("eos", eos)
        self._chat_rules = chat
        self.chat: ChatTokenizer | None = None
        self._control = ControlTokens(tokenizer)
        self.texts_with_control_tokens = 0
        """Texts so far that spell a control token, as text rendered for a chat does."""

    def _ids(self, name: str, token: str | None) -> list[int]:
        if token is None:
            return []
        number = self.tokenizer.convert_tokens_to_ids(token)
        if number is None or self.tokenizer.convert_ids_to_tokens(number) != token:
            raise ValueError(f"--{name} {token} is no token of this tokenizer")
        return [number]

    def documents(
        self, records: Iterable[Record], *, skip_invalid=None
    ) -> Iterator[TokenizedDocument]:
        """Documents in the order of their records.

        Args:
            records: What to tokenise; consumed in batches.
            skip_invalid: Called with the message about each record that is left out; None stops at
                the first one.

        Raises:
            ValueError: A record cannot become a document, and `skip_invalid` is None; or there are
                conversations and the tokenizer cannot render them.
        """
        records = iter(records)
        while batch := list(itertools.islice(records, _BATCH_RECORDS)):
            texts = [r.values["text"] for r in batch if r.kind == "text" and _is_text(r)]
            self.texts_with_control_tokens += sum(self._control.find(t) is not None for t in texts)
            encoded = iter(self._encode_texts(texts))
            if self.chat is None and any(record.kind == "messages" for record in batch):
                # Outside the loop: a tokenizer that cannot chat is no fault of a record's.
                self.chat = ChatTokenizer(self.tokenizer, self._chat_rules)
            for record in batch:
                try:
                    yield self._document(record, encoded)
                except ValueError as error:
                    if skip_invalid is None:
                        raise ValueError(f"{record.where}: {error}") from error
                    skip_invalid(f"{record.where}: {error}")

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        # Text that spells a control token stays text: otherwise a web page could end its document.
        core = self.tokenizer.backend_tokenizer
        earlier, core.encode_special_tokens = core.encode_special_tokens, True
        try:
            return [e.ids for e in core.encode_batch(texts, add_special_tokens=False)]
        finally:
            core.encode_special_tokens = earlier

    def _document(self, record: Record, encoded: Iterator[list[int]]) -> TokenizedDocument:
        if record.kind == "text":
            if not _is_text(record):
                if isinstance(record.values["text"], str):
                    check_characters(record.values["text"], "text")
                raise ValueError(f"text must be a string, got {record.values['text']!r:.80}")
            tokens = np.asarray([*self._before, *next(encoded), *self._after], np.int32)
            return TokenizedDocument("text", tokens, np.ones(len(tokens), bool))
        if record.kind == "messages":
            values = record.values
            tokens, wanted = self.chat.encode(values["messages"], values.get("tools"))
            return TokenizedDocument("messages", tokens, wanted)
        return self._given_tokens(record)

    def _given_tokens(self, record: Record) -> TokenizedDocument:
        tokens, mask = record.values["tokens"], record.values.get("loss_mask")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ValueError("tokens must be a list of integers")
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise ValueError(
                f"tokens must lie from 0 to {self.vocab_size - 1}, the tokenizer's vocabulary; "
                f"got {min(tokens)} to {max(tokens)}"
            )
        if mask is None:
            mask = [1] * len(tokens)
        if (
            not isinstance(mask, list)
            or len(mask) != len(tokens)
            or not all(isinstance(value, int | float) and value in (0, 1) for value in mask)
        ):
            raise ValueError("loss_mask must hold a 0 or 1 for each of the tokens")
        return TokenizedDocument("tokens", np.asarray(tokens, np.int32), np.asarray(mask, bool))


def _is_text(record: Record) -> bool:
    text = record.values["text"]
    if not isinstance(text, str):
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which no tokenizer takes
        return False
    return True


def load_tokenizer(path: str | os.PathLike):
    """The fast tokenizer of a Hugging Face directory.

    Raises:
        ValueError: There is none, or only a slow one.
    """
    from transformers import AutoTokenizer

    name = os.fspath(path)
    is_path = name.startswith((os.sep, ".", "~")) or name.count(os.sep) != 1
    if is_path and os.sep in name and not os.path.isdir(name):  # no name of a model on the hub
        raise ValueError(f"no tokenizer at {path}: there is no such directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, use_fast=True)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        # The last two are transformers' own words for a directory with a model and no tokenizer.
        raise ValueError(
            f"no tokenizer at {path}; give a Hugging Face directory, or the name of a model on the "
            f"hub and a network ({str(error).splitlines()[0]})"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(f"{path} has no tokenizer.json; save it as a fast tokenizer")
    return tokenizer


def default_bos(tokenizer) -> str | None:
    """The begin token if the tokenizer puts one before text by itself."""
    bos = tokenizer.bos_token_id
    return (
        tokenizer.bos_token if bos is not None and tokenizer("a").input_ids[:1] == [bos] else None
    )


def vocabulary_size(tokenizer) -> int:
    """The largest id of a fast tokenizer plus one, which is more than it has tokens where ids are
    left out between them.
    """
    return max(tokenizer.get_vocab().values()) + 1


def vocabulary_hash(tokenizer) -> str:
    """SHA-256 over which token each id stands for and, of BPE, the merges.

    Two models that agree in it mean the same by an id, whatever else their tokenizers add: another
    chat template, other roles of special tokens, other normalization of text.
    """
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges") or []
    # A merge is a pair, or in older files its two parts with a space between.
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    return sha256_json({"vocabulary": tokenizer.get_vocab(), "merges": pairs})


def tokenizer_hash(tokenizer) -> str:
    """SHA-256 over the vocabulary, the special tokens and how a probe text is cut.

    Independent of how the files are laid out, so a re-saved tokenizer keeps its hash.
    """
    return sha256_json(
        {
            "vocabulary": tokenizer.get_vocab(),
            "special": sorted(map(str, tokenizer.all_special_tokens)),
            "probe": tokenizer(_PROBE, add_special_tokens=True).input_ids,
        }
    )
