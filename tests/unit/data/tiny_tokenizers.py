"""Small tokenizers of every kind in use, trained in milliseconds, with the control tokens of a
chat: some trim offsets, some put a mark of white space before text, some drop white space.
"""

import functools

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import trainers as train
from transformers import PreTrainedTokenizerFast

CONTROL = ("<|user|>", "<|assistant|>", "<|observation|>", "<|end|>", "<s>")
CORPUS = [
    "def main():\n    return 1\n\n  the answer is  blue sky. ",
    "Hello there,\tfriend! 東京 — naïve 🙂 café\r\n",
    "what is it? it is  4.\n\n\nAnything else the cat sat on",
] * 4


def _byte_level(trim_offsets):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, train.BpeTrainer(vocab_size=340, initial_alphabet=alphabet)


def _sentencepiece_bpe():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return tokenizer, train.BpeTrainer(
        vocab_size=360, special_tokens=pieces, limit_alphabet=30, initial_alphabet=["▁"]
    )


def _unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return tokenizer, train.UnigramTrainer(
        vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"]
    )


def _word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer, train.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]"])


_KINDS = {
    "byte-level": functools.partial(_byte_level, False),
    "byte-level trimmed": functools.partial(_byte_level, True),
    "sentencepiece-bpe": _sentencepiece_bpe,
    "unigram": _unigram,
    "wordpiece": _word_piece,
}
KINDS = tuple(_KINDS)


@functools.cache
def tiny_tokenizer(kind: str, *, swallows_space: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of one of KINDS; its <|end|> may swallow white space, as Phi-3's does."""
    tokenizer, trainer = _KINDS[kind]()
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, rstrip=swallows_space and t == "<|end|>") for t in CONTROL]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
