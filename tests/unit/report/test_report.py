"""What `megatron-kd report` prints of students in Hugging Face directories."""

import torch
from small_report import VOCAB
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from megatron_kd.tools.report.report_command import continuations

WORDS = {"stop": 0} | {f"w{number}": number for number in range(1, VOCAB)}


def test_continuations_take_the_most_likely_token_each_time(models):
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="w1"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    names = ["input_ids", "attention_mask"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="stop", model_input_names=names
    )
    fast.save_pretrained(models["a"])
    model = AutoModelForCausalLM.from_pretrained(models["a"]).eval()
    prompts = ["w3 w17 w9", "w21"]
    for prompt, text in zip(prompts, continuations(models["a"], prompts, tokens=5), strict=True):
        tokens = [WORDS[word] for word in prompt.split()]
        with torch.no_grad():
            for _ in range(5):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert 0 not in tokens
        assert text.split() == [f"w{token}" for token in tokens]
