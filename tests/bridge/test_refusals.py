"""Wrong input is refused in one sentence before any process group starts; --dry-run shows what
would run.
"""

import json
import subprocess
import sys

import pytest
import small_world
import torch
import yaml
from launch import DISTILL, REPOSITORY, environment, prepare_all, run_cases
from layouts import EVALUATES_ONLINE_PIPELINES
from transformers import LlamaForCausalLM


def wrong_caches(world):
    """Caches that do not fit: another vocabulary; entries sampled at random."""
    folder = world.parent / "wrong"
    teacher = LlamaForCausalLM.from_pretrained(world.parent / "teacher").eval()
    made = {}
    for name, difference in (
        ("vocabulary", {"vocab_size": small_world.VOCAB_SIZE + 12}),
        ("sampled", {"sampling": {"method": "random", "draws": 8, "seed": 1}}),
    ):
        made[name] = folder / name
        for split in ("train", "validation"):
            small_world.write_cache(
                made[name] / split, teacher, small_world.documents(6, seed=9), **difference
            )
    return made


def teacher_of_another_vocabulary(world):
    """A teacher's directory with the configuration alone, as no more is read of it here."""
    directory = world.parent / "wrong" / "teacher"
    directory.mkdir(parents=True)
    config = json.loads((world.parent / "teacher" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))
    return directory


def many_short_documents(world):
    """A cache of block-packed samples that need 64 positions when every document is padded to 4."""
    folder = world.parent / "short-documents"
    teacher = LlamaForCausalLM.from_pretrained(world.parent / "teacher").eval()
    sample = [(torch.tensor([5, 6]), torch.tensor([True, False]))] * 16
    for split in ("train", "validation"):
        small_world.write_packed(folder, split, teacher, [sample] * 8, "block")
    return folder / "cache"


@pytest.fixture(scope="module")
def answers(world):
    caches = wrong_caches(world)
    online = small_world.online(world.parent, "fused_online")
    block = f"cache.path={world.parent}/block/cache"
    pipeline = [
        "bridge.model.pipeline_model_parallel_size=2",
        "bridge.model.virtual_pipeline_model_parallel_size=2",
    ]
    context = "bridge.model.context_parallel_size"
    short = f"cache.path={many_short_documents(world)}"
    two_stages = ["bridge.model.pipeline_model_parallel_size=2", "bridge.train.eval_iters=0"]
    tensor = "bridge.model.tensor_model_parallel_size"
    cases = {
        "fine": [],
        "uneven replicas": ["launch.ranks_per_node=3", f"{tensor}=2"],
        "whole replicas": ["launch.ranks_per_node=4", f"{tensor}=2"],
        "nodes alone": ["launch.nodes=2"],
        "started alone": ["start", "launch.ranks_per_node=2", f"{tensor}=2"],
        "fewer samples than a batch": [
            "data.dataloader=cyclic",
            "bridge.train.global_batch_size=64",
        ],
        "online, virtual pipeline": [
            *online,
            *two_stages,
            "bridge.model.virtual_pipeline_model_parallel_size=2",
            "bridge.model.overlap_p2p_comm=true",
            "bridge.model.batch_p2p_comm=false",
        ],
        "online, teacher's heads": [*online, f"{tensor}=10"],
        "online, another vocabulary": [
            *online,
            f"teacher.hf_path={teacher_of_another_vocabulary(world)}",
        ],
        "online, last stage": [*online, *two_stages, "hidden_states.pairs=[[1,2],[-1,3]]"],
        "online, earlier stage": [*online, *two_stages, "hidden_states.pairs=[[0,3]]"],
        "online, teacher's earlier stage": [*online, *two_stages, "hidden_states.pairs=[[1,1]]"],
        "block": [block, f"{context}=2"],
        "block micro-batches": [block, "bridge.train.micro_batch_size=2"],
        "short documents": [short],
        "short documents, context parallel": [short, f"{context}=2"],
        "room for short documents": [short, f"{context}=2", "bridge.model.seq_length=64"],
        "block, too short": [block, "bridge.model.seq_length=16"],
        "uneven parts": [f"{context}=3"],
        "virtual pipeline": pipeline,
        "virtual pipeline, batch": [*pipeline, "data.dataloader=batch"],
        "expert overlap": ["bridge.model.overlap_moe_expert_parallel_comm=true"],
        "megatron fsdp": [
            "bridge.ddp.use_megatron_fsdp=true",
            f"bridge.checkpoint.save={world.parent}/fsdp",
        ],
        "torch fsdp": ["bridge.dist.use_torch_fsdp2=true"],
        "unknown section": ["bridge.trian.train_iters=3"],
        "unknown field": ["bridge.train.train_itres=3"],
        "wrong type": ["bridge.train.train_iters=many"],
        "wrong choice": ["bridge.scheduler.lr_decay_style=cosin"],
        "required": ["bridge.model.calculate_per_token_loss=false"],
        "dataset": ["bridge.dataset.num_workers=3"],
        "batch": ["bridge.train.global_batch_size=6", "bridge.train.micro_batch_size=4"],
        "no iterations": ["bridge.train.train_iters=0"],
        "vocabulary": [f"cache.path={caches['vocabulary']}"],
        "fewer entries": ["cache.topk=2"],
        "more entries": ["cache.topk=1000"],
        "fewer of a sample": [f"cache.path={caches['sampled']}", "cache.topk=2"],
        "no cache": ["cache.path=/nowhere/cache"],
        "bucket": ["loss.tail=bucket", "loss.temperature=2"],
        "rank of adapters": ["student.lora.dim=6", "bridge.model.tensor_model_parallel_size=4"],
        "no student": ["student.hf_path=/nowhere/student"],
        "other data": [f"data.path={world.parent}/other-data"],
        "cyclic": ["data.dataloader=cyclic", "data.shuffle=false"],
        "length": [*online, "bridge.model.seq_length=64"],
        "online": online,
        "export with pipeline": [
            *online,
            "bridge.model.pipeline_model_parallel_size=2",
            "bridge.train.eval_iters=0",
            f"export.hf_path={world.parent}/exported",
        ],
        "evaluation with pipeline": [*online, "bridge.model.pipeline_model_parallel_size=2"],
    }
    other = world.parent / "other-data" / "train"
    small_world.write_sequences(other, small_world.documents(small_world.TRAIN_SAMPLES, seed=77))
    return prepare_all(world, cases)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("fine", ["accepted"]),
        ("uneven replicas", ["takes 2 ranks", "the run has 3;", "torchrun --nproc-per-node"]),
        ("whole replicas", ["accepted"]),
        ("nodes alone", ["launch.nodes needs launch.ranks_per_node"]),
        ("started alone", ["takes 2 ranks", "the run has 1;", "torchrun --nproc-per-node"]),
        ("fewer samples than a batch", ["there are 40", "is 64", "data.dataloader=single"]),
        ("online, virtual pipeline", ["no virtual pipeline", "distil offline"]),
        ("online, teacher's heads", ["num_attention_heads of 4", "parallel_size=10"]),
        ("online, another vocabulary", ["teacher has 512 ids, the student 500", "--vocab-size"]),
        ("online, last stage", ["accepted"]),
        ("online, earlier stage", ["names layer 0", "last pipeline stage", "fewer stages"]),
        ("online, teacher's earlier stage", ["names layer 1", "last pipeline stage"]),
        ("online", ["accepted"]),
        ("block", ["accepted"]),
        ("block micro-batches", ["micro_batch_size=1, not 2"]),
        ("short documents", ["accepted"]),
        ("short documents, context parallel", ["64 positions", "multiple of 4", "set it to 64"]),
        ("room for short documents", ["accepted"]),
        ("block, too short", ["seq_length is 16", "less than the 32", "set it to 32"]),
        ("uneven parts", ["context_parallel_size=3", "a multiple of 6"]),
        ("virtual pipeline", ["overlap_p2p_comm=true", "batch_p2p_comm=false"]),
        ("virtual pipeline, batch", ["data.dataloader=batch", "single or cyclic"]),
        ("expert overlap", ["overlap_moe_expert_parallel_comm must be false"]),
        ("megatron fsdp", ["ckpt_format=fsdp_dtensor, not torch_dist"]),
        ("torch fsdp", ["use_torch_fsdp2 must be false", "use_megatron_fsdp"]),
        ("unknown section", ["bridge.trian", "did you mean bridge.train"]),
        ("unknown field", ["bridge.train.train_itres", "did you mean bridge.train.train_iters"]),
        ("wrong type", ["bridge.train.train_iters", "an integer", "'many'"]),
        ("wrong choice", ["bridge.scheduler.lr_decay_style", "did you mean cosine"]),
        ("required", ["bridge.model.calculate_per_token_loss must be true"]),
        ("dataset", ["bridge.dataset is set from"]),
        ("batch", ["global_batch_size=6", "micro_batch_size 4"]),
        ("no iterations", ["bridge.train.train_iters must be set"]),
        ("vocabulary", ["512 ids", "500 output rows", "--vocab-size 500"]),
        ("fewer entries", ["accepted"]),
        ("more entries", ["cache.topk=1000", "capture again with --topk 1000"]),
        ("fewer of a sample", ["sampled at random", "Remove cache.topk"]),
        ("no cache", ["/nowhere/cache", "megatron-kd capture"]),
        ("bucket", ["loss.temperature=2.0", "--temperatures 2.0"]),
        ("rank of adapters", ["student.lora.dim=6", "a multiple of 4"]),
        ("no student", ["/nowhere/student", "megatron-kd init-student"]),
        ("other data", ["other data", "Capture again"]),
        ("cyclic", ["always shuffles"]),
        ("length", ["seq_length is 64", "--seq-length 32", "bridge.model.seq_length=32"]),
        ("export with pipeline", ["export.hf_path", "megatron-kd export"]),
        (
            "evaluation with pipeline",
            ["accepted"] if EVALUATES_ONLINE_PIPELINES else ["bridge.train.eval_iters=0"],
        ),
    ],
)
def test_each_fault_names_the_remedy(answers, case, expected):
    for part in expected:
        assert part in answers[case], answers[case]


@pytest.mark.extended
def test_dry_run_prints_the_resolved_configuration_and_starts_nothing(world, tmp_path):
    command = [sys.executable, str(DISTILL), "--config", str(world), "--dry-run"]
    done = subprocess.run(
        [*command, f"output_dir={tmp_path}/out", "loss.impl=dense"],
        env=environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    resolved = yaml.safe_load(done.stdout)
    assert resolved["loss"]["impl"] == "dense"
    assert resolved["bridge"]["model"]["num_layers"] == 2
    assert resolved["bridge"]["dist"]["distributed_backend"] == "gloo"
    assert "CPU backend with gloo" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.extended
def test_every_loader_reads_the_same_samples(world):
    """`single` and `batch` see one order whatever the workers; `cyclic` sees the host's, and all of
    the data.
    """
    cache = world.parent / "cache"
    common = ["bridge.train.train_iters=20", "bridge.train.eval_interval=10"]
    runs = run_cases(
        world,
        1,
        {
            "single": common,
            "single-workers": [*common, "data.num_workers=2"],
            "batch": [*common, "data.dataloader=batch"],
            "cyclic": [*common, "data.dataloader=cyclic", "data.num_workers=1"],
            "mixture": [
                *common,
                "cache.path=null",
                f"cache.mixture=[{{path: {cache}, weight: 1}}, {{path: {cache}, weight: 3}}]",
            ],
        },
    )
    assert len(runs["mixture"].train()) == 20
    assert runs["single-workers"].train() == runs["single"].train()
    assert runs["batch"].train() == pytest.approx(runs["single"].train(), rel=1e-6)
    assert len(runs["cyclic"].train()) == 20
    assert runs["cyclic"].train() != runs["single"].train()
    for name in ("single-workers", "batch", "cyclic"):
        assert runs[name].validation()[0] == pytest.approx(runs["single"].validation()[0], rel=1e-6)
