"""Components by layout, recompute mode and loss; losses against what they allocate."""

from dataclasses import replace

import pytest
import torch

from megatron_kd.config import LoraConfig, LossConfig
from megatron_kd.losses import (
    TopKTarget,
    dense_kd_loss,
    dense_online_kd_loss,
    fp32_sum,
    fused_chunked_kd_loss,
    fused_online_kd_loss,
    kernels,
    sparse_chunked_kd_loss,
)
from megatron_kd.tools.benchmark.peak_memory import peak_bytes as peak_bytes_of
from megatron_kd.tools.planning.activations import layer_activations
from megatron_kd.tools.planning.adapters import adapter_parameters
from megatron_kd.tools.planning.gpus import gpu
from megatron_kd.tools.planning.loss_memory import loss_memory
from megatron_kd.tools.planning.model_shape import LayerShape, ModelShape
from megatron_kd.tools.planning.run_settings import Recompute, RunSettings
from megatron_kd.tools.planning.stage_memory import (
    longest_sequence,
    micro_batches_in_flight,
    peak_bytes,
    plan_memory,
    rank_parameters,
    trained_parameters,
)
from megatron_kd.tools.planning.time_cost import step_time

H200 = 139 << 30
SMALL = ModelShape(
    name="small",
    hidden_size=8,
    ffn_size=16,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocab_size=16384,
    tied=False,
    gated=True,
    layers=(LayerShape(sharded=640, replicated=16),) * 2,
    final=8,
    dtype="bfloat16",
)


def total(shape, settings, impl="fused_chunked"):
    return peak_bytes(shape, settings, impl=impl, gpu_bytes=H200)


def parts(shape, settings, impl="fused_chunked"):
    return plan_memory(shape, settings, impl=impl, gpu_bytes=H200)[-1].parts


def test_eighteen_bytes_per_parameter_and_the_distributed_optimizers_share(student):
    one = parts(student, RunSettings(sequence_length=1024))
    states = one["weights"] + one["gradients"] + one["optimizer"]
    assert states == 18 * student.parameters
    run = RunSettings(sequence_length=1024, ranks=4, global_batch=4, distributed_optimizer=True)
    four = parts(student, run)
    assert four["optimizer"] == one["optimizer"] / 4
    assert (four["weights"], four["gradients"]) == (one["weights"], one["gradients"])
    # Ranks that share a sequence hold the same parameters, so they share the states as well.
    context = parts(student, replace(run, context_parallel=2))
    assert context["optimizer"] == four["optimizer"]


def test_adapters_alone_have_gradients_and_states():
    run = RunSettings(sequence_length=64, ranks=2, tensor_parallel=2, lora=LoraConfig(dim=4))
    plain = parts(SMALL, replace(run, lora=None))
    lora = parts(SMALL, run)
    qkv, proj, up, down = 4 * (8 + 16), 4 * (8 + 8), 4 * (8 + 32), 4 * (16 + 8)
    adapters = 2 * (qkv + proj + up + down) / 2
    assert lora["gradients"] == 4 * adapters and lora["optimizer"] == 12 * adapters
    assert lora["weights"] == plain["weights"] + 2 * adapters
    assert plain["loss"] - lora["loss"] == 4 * 16384 / 2 * 8  # no gradient of the output matrix
    times = [
        step_time(SMALL, each, impl="fused_chunked", gpu=gpu("h200"), trained_parameters=adapters)
        for each in (run, replace(run, lora=None))
    ]  # two of three products: no weight gradients
    assert times[0].model_flops == pytest.approx(times[1].model_flops * 2 / 3)
    assert times[0].products_s == pytest.approx(times[1].products_s * 2 / 3)
    first = LoraConfig(dim=4, target_modules=["*.layers.0.*.linear_qkv", "linear_fc2"])
    assert adapter_parameters(SMALL, first, range(2)) == qkv + 2 * down
    stages = replace(run, tensor_parallel=1, pipeline_parallel=2, lora=first)
    held = [sum(trained_parameters(SMALL, stages, stage)) for stage in range(2)]
    assert held == [qkv + down, down]


def test_ranks_together_hold_every_parameter_once(student):
    tensor, pipeline = 2, 4
    run = RunSettings(
        sequence_length=64, ranks=8, tensor_parallel=tensor, pipeline_parallel=pipeline
    )
    held = sum(sum(rank_parameters(student, run, stage)) for stage in range(pipeline)) * tensor
    norms = sum(layer.replicated for layer in student.layers) + student.final
    assert held == student.parameters + norms * (tensor - 1)


def test_a_tied_matrix_is_copied_to_the_last_stage():
    tied = replace(SMALL, tied=True)
    whole = rank_parameters(tied, RunSettings(sequence_length=64), 0)[0]
    assert whole == tied.parameters
    run = RunSettings(sequence_length=64, ranks=2, pipeline_parallel=2)
    matrix = tied.vocab_size * tied.hidden_size
    assert sum(rank_parameters(tied, run, s)[0] for s in range(2)) == tied.parameters + matrix


def test_layer_activations_by_hand(student):
    """Per position: 4 hidden, q k v, attention, 32 fp32 sums, twice and once the FFN; bf16."""
    run = RunSettings(sequence_length=8192)
    layer = layer_activations(student, student.layers[0], run)
    by_hand = 2 * (4 * 2816 + 4096 + 2 * 1024 + 4096 + 2 * 7168 + 7168) + 4 * 32
    assert layer.kept == layer.rebuilt == by_hand
    full = replace(run, recompute=Recompute(mode="full"))
    assert layer_activations(student, student.layers[0], full).kept == 2 * 2816
    mlp = replace(run, recompute=Recompute(mode="selective", modules=("mlp",)))
    dropped = 2 * (2816 + 3 * 7168)
    assert layer_activations(student, student.layers[0], mlp).kept == by_hand - dropped
    two = replace(run, ranks=2, tensor_parallel=2)
    halved = layer_activations(student, student.layers[0], two).kept
    assert halved == by_hand / 2 + 2 * 4 * 2816 / 2  # norms stay whole without sequence parallelism
    sharded = replace(two, sequence_parallel=True)
    assert layer_activations(student, student.layers[0], sharded).kept == by_hand / 2


def test_recompute_modes_in_order(student):
    def activations(recompute):
        return parts(student, RunSettings(sequence_length=8192, recompute=recompute))["activations"]

    none, full = activations(Recompute()), activations(Recompute(mode="full"))
    mlp = activations(Recompute(mode="selective", modules=("mlp",)))
    block = activations(Recompute(mode="full", method="block", layers=14))
    groups = activations(Recompute(mode="full", layers=4))
    assert groups == full / 4 < full < mlp < none
    assert block == pytest.approx((none + full) / 2)
    with pytest.raises(ValueError, match="recompute_modules has core_atn"):
        activations(Recompute(mode="selective", modules=("core_atn",)))


def test_context_parallelism_divides_positions(student):
    run = RunSettings(sequence_length=8192, recompute=Recompute(mode="full"))
    one = parts(student, run, "dense")
    two = parts(student, replace(run, ranks=2, context_parallel=2), "dense")
    for name in ("activations", "logits", "loss", "cache buffers"):
        assert two[name] == one[name] / 2


def test_experts():
    layer = LayerShape(sharded=1000, replicated=64, experts=80_000)
    moe = replace(SMALL, layers=(layer,) * 2, experts=8, experts_per_token=2, expert_ffn_size=16)
    run = RunSettings(sequence_length=64, ranks=4, expert_parallel=4, global_batch=4)
    assert rank_parameters(moe, run, 0)[1] == 2 * 80_000 / 4
    assert moe.active_parameters(layer) == 1000 + 80_000 / 4
    whole = layer_activations(moe, layer, run).kept
    moe_again = replace(run, recompute=Recompute(mode="selective", modules=("moe",)))
    dropped = 2 * (3 * 2 * 16) + 2 * 2 * 2 * 8 + 4 * 8
    assert layer_activations(moe, layer, moe_again).kept == whole - dropped


@pytest.mark.parametrize(
    ("stage", "virtual", "expected"), [(0, 1, 4), (3, 1, 1), (0, 2, 11 / 2), (3, 2, 5 / 2)]
)
def test_micro_batches_in_flight(stage, virtual, expected):
    run = RunSettings(
        sequence_length=64,
        global_batch=8,
        ranks=4,
        pipeline_parallel=4,
        virtual_pipeline=virtual,
    )
    assert micro_batches_in_flight(run, stage) == expected
    few = replace(run, global_batch=2)
    assert micro_batches_in_flight(few, stage) <= 2


def test_uneven_layers_are_refused(student):
    run = RunSettings(sequence_length=64, ranks=3, pipeline_parallel=3)
    with pytest.raises(ValueError, match="28 layers cannot be divided evenly"):
        total(student, run)


@pytest.mark.parametrize("impl", ["dense", "sparse_chunked", "fused_chunked"])
def test_longest_sequence_fits_and_the_next_does_not(student, impl):
    run = RunSettings(sequence_length=1024)
    usable = 120 << 30
    longest = longest_sequence(student, run, impl=impl, gpu_bytes=H200, usable_bytes=usable)
    assert total(student, replace(run, sequence_length=longest), impl) <= usable
    assert total(student, replace(run, sequence_length=longest + 128), impl) > usable
    nothing = longest_sequence(student, run, impl=impl, gpu_bytes=H200, usable_bytes=50 << 30)
    assert nothing == 0


def test_losses_in_order(student):
    run = RunSettings(sequence_length=16384, recompute=Recompute(mode="full"))
    dense, sparse, fused = (
        total(student, run, impl) for impl in ("dense", "sparse_chunked", "fused_chunked")
    )
    assert fused < sparse < dense


FUSED = [
    (impl, gradient)
    for impl in ("fused_chunked", "fused_online")
    for gradient in ("in_forward", "recompute")
]


@pytest.mark.parametrize(
    ("impl", "gradient", "width", "trained"),
    [
        ("dense", "auto", 8, True),
        ("sparse_chunked", "auto", 8, True),
        ("online_dense", "auto", 8, True),
        *((*case, width, trained) for case in FUSED for width in (8, 128) for trained in (0, 1)),
    ],
)
def test_planned_losses_take_what_is_allocated(impl, gradient, width, trained, monkeypatch):
    """Loss, forward and backward, in bf16: planned for the mode that runs, within a twentieth.

    h is 8, where a chunk of logits outweighs the output matrix, or 128, where it weighs the same.
    """
    # Scratch of the CPU's kernels, which those on CUDA do without.
    monkeypatch.setattr(kernels.eager, "CPU_BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(fp32_sum, "CPU_SLICE_BYTES", 1 << 16)
    shape = replace(SMALL, hidden_size=width, vocab_size=4096)
    vocab, positions, k, chunk = shape.vocab_size, 512, 4, 128
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, 1, width, generator=make).bfloat16().requires_grad_()
    weight = torch.randn(vocab, width, generator=make).bfloat16().requires_grad_(bool(trained))
    weight.main_grad = torch.zeros(vocab, width)
    weight.grad_added_to_main_grad = False
    fused = dict(chunk_size=chunk, gradient_accumulation_fusion=bool(trained))
    ids = torch.arange(k).expand(positions, 1, k)
    target = TopKTarget(ids, torch.full((positions, 1, k), -3.0))
    mask = torch.ones(positions, 1)

    def run():
        if impl == "fused_chunked":
            loss = fused_chunked_kd_loss(
                hidden, weight, target, gradient=gradient, token_weights=mask, **fused
            )
        elif impl == "fused_online":
            loss = fused_online_kd_loss(
                hidden,
                weight,
                hidden.detach(),
                weight.detach(),
                gradient=gradient,
                token_weights=mask,
                **fused,
            )
        else:  # the host's output layer sums its gradient into the host's buffer
            logits = hidden @ weight.detach().T
            if impl == "dense":
                loss = dense_kd_loss(logits, target)
            elif impl == "sparse_chunked":
                loss = sparse_chunked_kd_loss(logits, target, chunk_size=chunk, reuse_logits=True)
            else:
                loss = dense_online_kd_loss(logits, hidden.detach() @ weight.detach().T)
            del logits
        loss.sum().backward()

    with kernels.use_backend("eager"):
        allocated = peak_bytes_of(run, torch.device("cpu"))
    # There before: the last norm's input and output, online the teacher's hidden states.
    inputs = (3 if impl == "fused_online" else 2) * hidden.nbytes
    planned = loss_memory(
        impl,
        shape,
        RunSettings(
            sequence_length=positions,
            topk=k,
            mode="online" if "online" in impl else "offline",
            loss=LossConfig(chunk_size=chunk, gradient=gradient),
            lora=None if trained else LoraConfig(dim=4),
        ),
        H200,
        shape,
    ).total
    assert planned == pytest.approx(allocated + inputs, rel=0.05)


def test_planned_states_take_what_mixed_precision_adam_allocates():
    """bf16 weights, fp32 gradients, fp32 main weights and both of Adam's moments."""
    count = SMALL.parameters

    def states():
        weights = torch.zeros(count, dtype=torch.bfloat16)
        main = weights.float().requires_grad_()
        main.grad = torch.ones(count)
        adam = torch.optim.Adam([main], lr=1e-3, foreach=False)
        adam.step()
        return weights, main, adam

    held = states()
    tensors = [held[0], held[1], held[1].grad, *held[2].state[held[1]].values()]
    allocated = sum(x.nbytes for x in tensors if x.numel() > 1)
    run = RunSettings(sequence_length=1024, vocab_divisor=1)
    one = parts(SMALL, run)
    assert one["weights"] + one["gradients"] + one["optimizer"] == allocated
