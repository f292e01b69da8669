"""A random Llama that chats: a byte-level tokenizer with control tokens, a chat template, weights;
and prompts for it."""

import json

import torch
from tiny_teacher import write_teacher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTROL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def tiny_chat_tokenizer(shift=0):
    """Bytes and control tokens; `shift` gives the bytes other ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = letters[shift:] + letters[:shift]
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_chat_model(path, *, seed=0, dtype=torch.float32):
    tokenizer = tiny_chat_tokenizer()
    tokenizer.save_pretrained(path)
    model = write_teacher(path, seed=seed, vocab=len(tokenizer), dtype=dtype)
    return model, tokenizer


def write_prompts(path, count=7):
    """Conversations of one and two questions, some answered already, and no two alike."""
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            turns = [{"role": "user", "content": "question " + "x" * (3 * i % 11) + str(i)}]
            if i % 3 == 1:
                turns.append({"role": "assistant", "content": "an answer from elsewhere"})
            if i % 3 == 2:
                turns.append({"role": "assistant", "content": "well"})
                turns.append({"role": "user", "content": "and then?"})
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def command(prompts, model, output, *more):
    return [
        "generate",
        *("--prompts", str(prompts)),
        *("--model", str(model)),
        *("--output", str(output)),
        *("--max-new-tokens", "12", "--shard-prompts", "2"),
        *more,
    ]


def records_of(folder):
    with open(folder / "responses.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
