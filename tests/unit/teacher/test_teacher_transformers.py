import numpy as np
import pytest
import torch
from tiny_teacher import VOCAB, documents, full_logprobs, write_teacher
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
)

from megatron_kd.teacher.engines.base import EngineError, RowRequest, TeacherDocument
from megatron_kd.teacher.engines.batches import batches
from megatron_kd.teacher.engines.transformers import TransformersEngine, TransformersOptions


def run(path, docs, request, **options):
    engine = TransformersEngine(path, request, TransformersOptions(**options))
    rows = dict(engine.stream(docs))
    assert sorted(rows) == list(range(len(docs)))
    return engine, [rows[i] for i in range(len(docs))]


@pytest.mark.parametrize("options", [{}, {"batch_tokens": 1}, {"head_chunk_bytes": 1}], ids=str)
def test_rows_are_the_definition(teacher_dir, options):
    docs = documents(0, [1, 5, 17, 40, 40, 63])
    request = RowRequest(topk=9, vocab_size=VOCAB, temperatures=(2.0,), hidden=True)
    engine, rows = run(teacher_dir, docs, request, **options)
    model = LlamaForCausalLM.from_pretrained(teacher_dir).eval()
    for document, got in zip(docs, rows, strict=True):
        want = full_logprobs(model, document.tokens)[document.rows]
        top = want.topk(9)
        np.testing.assert_array_equal(got.topk_ids, top.indices)
        np.testing.assert_allclose(got.topk_logprobs, top.values, atol=2e-5)
        np.testing.assert_allclose(got.log_z[2.0], (want / 2).logsumexp(-1), atol=2e-5)
        again = got.hidden @ engine.loaded.model.lm_head.weight.detach().numpy().T
        np.testing.assert_allclose(
            torch.from_numpy(again).log_softmax(-1).gather(-1, top.indices), top.values, atol=2e-5
        )


def test_soft_cap_of_the_architecture_is_applied(tmp_path):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        final_logit_softcapping=2.0,
    )
    model = Gemma2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    docs = documents(1, [12, 30])
    _, rows = run(tmp_path, docs, RowRequest(topk=5, vocab_size=VOCAB))
    for document, got in zip(docs, rows, strict=True):
        want = full_logprobs(model, document.tokens)[document.rows].topk(5)
        np.testing.assert_array_equal(got.topk_ids, want.indices)
        np.testing.assert_allclose(got.topk_logprobs, want.values, atol=2e-5)
        assert got.topk_logprobs.min() > -np.log(VOCAB) - 4.0  # capped at ±2


def test_logits_never_exist_for_the_whole_batch(teacher_dir, monkeypatch):
    request = RowRequest(topk=3, vocab_size=VOCAB)
    engine = TransformersEngine(
        teacher_dir, request, TransformersOptions(head_chunk_bytes=16 * VOCAB * 10)
    )
    widths = []
    engine.loaded.model.lm_head.register_forward_hook(
        lambda _, inputs, __: widths.append(inputs[0].shape[:2])
    )
    docs = documents(3, [40, 40, 40], supervised=0.9)
    list(engine.stream(docs))
    assert widths and all(b == 1 and s <= 10 for b, s in widths)


def test_rows_do_not_depend_on_the_order_of_documents(teacher_dir):
    docs = documents(4, [33, 12, 20])
    docs.append(TeacherDocument(np.arange(33, dtype=np.int32), np.arange(32)))
    request = RowRequest(topk=20, vocab_size=VOCAB)
    for sampling in ("topk", "random"):
        request = RowRequest(topk=20, vocab_size=VOCAB, sampling=sampling)
        _, first = run(teacher_dir, docs, request, batch_tokens=70)
        _, second = run(teacher_dir, docs[::-1], request, batch_tokens=70)
        for a, b in zip(first, second[::-1], strict=True):
            assert a.topk_ids.tobytes() == b.topk_ids.tobytes()
            assert a.topk_logprobs.tobytes() == b.topk_logprobs.tobytes()


def test_batches_hold_like_lengths_within_the_bound():
    docs = documents(5, [3, 50, 7, 49, 200, 8, 50], supervised=1.0)
    made = list(batches(docs, 100))
    assert sorted(i for batch in made for i in batch) == list(range(7))
    for batch in made:
        widths = [docs[i].run_tokens for i in batch]
        assert len(batch) == 1 or len(batch) * max(widths) <= 100
    assert made[0] == [4]


def test_bf16_teacher(tmp_path):
    model = write_teacher(tmp_path, dtype=torch.bfloat16)
    docs = documents(6, [30])
    _, rows = run(tmp_path, docs, RowRequest(topk=10, vocab_size=VOCAB, hidden=True))
    ids = torch.from_numpy(rows[0].topk_ids).long()
    plain = full_logprobs(model, docs[0].tokens)[docs[0].rows].gather(-1, ids)
    truth = full_logprobs(model.float(), docs[0].tokens)[docs[0].rows].gather(-1, ids)
    got = torch.from_numpy(rows[0].topk_logprobs)
    assert (got - truth).abs().max() <= 2 * (plain - truth).abs().max()
    assert rows[0].hidden.dtype == np.float32


def test_missing_weights_are_refused(teacher_dir, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(teacher_dir, tmp_path / "t")
    weights = load_file(tmp_path / "t/model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "t/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match="up_proj"):
        TransformersEngine(
            tmp_path / "t", RowRequest(topk=1, vocab_size=VOCAB), TransformersOptions()
        )


def test_logits_that_are_no_function_of_single_rows_are_refused(teacher_dir, monkeypatch):
    plain = LlamaForCausalLM.forward

    def mixed(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits.cumsum(1)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", mixed)
    with pytest.raises(EngineError, match="does not compute its logits row by row"):
        TransformersEngine(teacher_dir, RowRequest(topk=1, vocab_size=VOCAB), TransformersOptions())


def test_wider_vocabulary_than_the_teacher_is_refused(teacher_dir):
    with pytest.raises(EngineError, match="131 output rows"):
        TransformersEngine(teacher_dir, RowRequest(topk=1, vocab_size=132), TransformersOptions())


def test_fingerprint_changes_with_a_weight_and_not_with_the_name(teacher_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    from megatron_kd.models.fingerprint import model_fingerprint

    write_teacher(tmp_path / "same")
    write_teacher(tmp_path / "other")
    weights = load_file(tmp_path / "other/model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    first, same, other = (
        model_fingerprint(p) for p in (teacher_dir, tmp_path / "same", tmp_path / "other")
    )
    assert first["weights_xxh3_128"] == same["weights_xxh3_128"] != other["weights_xxh3_128"]
    assert first["config_sha256"] == same["config_sha256"] == other["config_sha256"]


def test_fingerprint_is_of_the_weights_that_are_read(tmp_path):
    from megatron_kd.models.fingerprint import model_fingerprint

    write_teacher(tmp_path / "t")
    first = model_fingerprint(tmp_path / "t")
    (tmp_path / "t/pytorch_model.bin").write_bytes(b"a twin that transformers leaves alone")
    assert model_fingerprint(tmp_path / "t") == first
    write_teacher(tmp_path / "t", seed=1)  # the same files, other weights, the same process
    assert model_fingerprint(tmp_path / "t")["weights_xxh3_128"] != first["weights_xxh3_128"]
    (tmp_path / "t/model.safetensors").unlink()
    (tmp_path / "t/pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="no weight files"):
        model_fingerprint(tmp_path / "t")


def test_deepseek_v2_attends_with_the_scale_of_its_authors(tmp_path):
    torch.manual_seed(0)
    rope = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16}
    config = DeepseekV2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=8,
        initializer_range=0.5,
        rope_scaling=rope | {"mscale": 0.707, "mscale_all_dim": 0.707},
    )
    model = DeepseekV2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    for layer in model.model.layers:  # modeling_deepseek.py beside the published weights
        layer.self_attn.scaling = 16**-0.5 * (0.1 * 0.707 * np.log(40.0) + 1) ** 2
    docs = documents(2, [30, 48])
    _, rows = run(tmp_path, docs, RowRequest(topk=5, vocab_size=VOCAB))
    for document, got in zip(docs, rows, strict=True):
        want = full_logprobs(model, document.tokens)[document.rows].topk(5)
        np.testing.assert_allclose(got.topk_logprobs, want.values, atol=5e-5)
