"""A fast Hugging Face tokenizer from the vocabulary inside a GGUF file.

transformers' own conversion keeps only vocabulary and merges: it splits digits and spaces by the
rule of GPT-2 whatever the model was trained with, and decodes by the steps of SentencePiece. The
file names its splitting rule in `tokenizer.ggml.pre`; the known ones are rebuilt here, and an
unknown one is refused: a tokenizer that is almost right gives a teacher that is quietly wrong.
"""

from collections.abc import Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2_words():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_then_gpt2_words():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _pattern(words: str):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS = {
    "gpt-2": _gpt2_words,
    "smollm": _single_digits_then_gpt2_words,
    "llama-bpe": lambda: _pattern(_LLAMA3_WORDS),
    "qwen2": lambda: _pattern(_QWEN2_WORDS),
}


def tokenizer_from_fields(fields: Mapping, *, max_length: int | None) -> PreTrainedTokenizerFast:
    """Builds the tokenizer a GGUF file describes.

    Args:
        fields: GGUF metadata, key to plain value (`tokenizer.ggml.*`, `tokenizer.chat_template`).
        max_length: Tokens the model was made for; None leaves it open.

    Raises:
        ValueError: The file's tokenizer is not a byte-level BPE with a known splitting rule.
    """
    model, rule = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or rule not in _PRE_TOKENIZERS:
        raise ValueError(
            f"the GGUF file's tokenizer is {model!r} with splitting rule {rule!r}; expected 'gpt2' "
            f"(byte-level BPE) with one of {sorted(_PRE_TOKENIZERS)}. Give the original model's "
            "tokenizer with --tokenizer DIR"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = _PRE_TOKENIZERS[rule]()
    core.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            core.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            core.add_tokens([AddedToken(token, special=False, normalized=False)])
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = fields.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            special[f"{name}_token"] = tokens[number]
    if max_length is not None:
        special["model_max_length"] = max_length
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # decoders take no token_type_ids
        **special,
    )
    if fields.get("tokenizer.ggml.add_bos_token"):
        _prepend_bos(tokenizer)
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer


def _prepend_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.bos_token_id)],
    )
