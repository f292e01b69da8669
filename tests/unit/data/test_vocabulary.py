"""What the ids of a tokenizer stand for, as prepared data and caches name it."""

import json

import pytest
from tiny_tokenizers import CORPUS, KINDS, tiny_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from megatron_kd.data.prepare.command import PrepareOptions, prepare
from megatron_kd.data.prepare.documents import (
    load_tokenizer,
    tokenizer_hash,
    vocabulary_hash,
    vocabulary_size,
)
from megatron_kd.models.fingerprint import Vocabulary, vocabulary_of


def changed(tokenizer, change) -> PreTrainedTokenizerFast:
    """A tokenizer with its tokenizer.json changed in place."""
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    change(values)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(values)))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_again_it_is_the_same(kind, tmp_path):
    tokenizer = tiny_tokenizer(kind)
    (tmp_path / "config.json").write_text("{}")
    tokenizer.save_pretrained(tmp_path)
    want = Vocabulary(vocabulary_size(tokenizer), vocabulary_hash(tokenizer))
    assert vocabulary_of(tmp_path) == want
    assert want.size == len(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_what_else_a_tokenizer_says_does_not_matter(kind):
    tokenizer = tiny_tokenizer(kind)
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<s>",
        bos_token="<|end|>",
        chat_template="{{ messages }}",
    )
    assert tokenizer_hash(other) != tokenizer_hash(tokenizer)
    assert vocabulary_hash(other) == vocabulary_hash(tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ids_exchanged_are_another_vocabulary(kind):
    def exchange(values):
        model = values["model"]
        if isinstance(model["vocab"], list):
            model["vocab"][7:9] = model["vocab"][8], model["vocab"][7]
            return
        first, second = sorted(model["vocab"], key=model["vocab"].get)[7:9]
        model["vocab"][first], model["vocab"][second] = 8, 7

    tokenizer = tiny_tokenizer(kind)
    assert vocabulary_hash(changed(tokenizer, exchange)) != vocabulary_hash(tokenizer)


def test_other_merges_are_another_vocabulary_however_they_are_written():
    def reverse(values):
        values["model"]["merges"] = values["model"]["merges"][::-1]

    def as_text(values):
        values["model"]["merges"] = [" ".join(merge) for merge in values["model"]["merges"]]

    tokenizer = tiny_tokenizer("byte-level")
    assert vocabulary_hash(changed(tokenizer, as_text)) == vocabulary_hash(tokenizer)
    assert vocabulary_hash(changed(tokenizer, reverse)) != vocabulary_hash(tokenizer)


def test_ids_that_are_left_out_count(tmp_path):
    def move_the_last_away(values):
        values["added_tokens"] = []
        vocabulary = values["model"]["vocab"]
        vocabulary[max(vocabulary, key=vocabulary.get)] = 160

    tokenizer = changed(tiny_tokenizer("wordpiece"), move_the_last_away)
    assert len(tokenizer) < 161
    assert vocabulary_size(tokenizer) == 161
    tokenizer.eos_token = "cat"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in CORPUS))
    options = PrepareOptions(seq_length=16)
    manifests = prepare([str(text)], tmp_path / "tokenizer", tmp_path / "data", options)
    assert manifests["train"]["vocab_size"] == 161
    again = load_tokenizer(tmp_path / "tokenizer")
    assert manifests["train"]["vocabulary"] == vocabulary_hash(again)
