"""The parts of a step's time against sums by hand."""

from dataclasses import replace

import pytest

from megatron_kd.config import LossConfig
from megatron_kd.tools.planning.gpus import gpu
from megatron_kd.tools.planning.loss_memory import loss_memory
from megatron_kd.tools.planning.model_shape import LayerShape, ModelShape
from megatron_kd.tools.planning.run_settings import Recompute, RunSettings
from megatron_kd.tools.planning.time_cost import forward_flops, step_time

SHAPE = ModelShape(
    name="small",
    hidden_size=64,
    ffn_size=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=1024,
    tied=False,
    gated=True,
    layers=(LayerShape(sharded=30720, replicated=128),) * 4,
    final=64,
    dtype="bfloat16",
)
RUN = RunSettings(sequence_length=256, micro_batch=2, global_batch=8)
TOKENS = 256 * 8


def time_of(settings, impl="fused_chunked"):
    return step_time(SHAPE, settings, impl=impl, gpu=gpu("h100"), trained_parameters=1e6)


@pytest.mark.parametrize(("virtual", "share"), [(1, 4 / 5), (2, 8 / 9)])
def test_a_pipeline_is_full_but_for_its_bubble(virtual, share):
    """Four micro-batches through two stages; interleaved, every stage has each of them twice."""
    whole = time_of(RUN)
    halves = time_of(replace(RUN, ranks=2, pipeline_parallel=2, virtual_pipeline=virtual))
    assert (whole.pipeline_share, halves.pipeline_share) == (1, share)
    busy = halves.products_s + halves.logits_s + halves.messages_s
    assert halves.total_s == pytest.approx(busy / share + halves.optimizer_s)


def test_left_to_itself_the_fused_loss_recomputes_in_fp16_alone():
    """As the loss does: a fourth product with the output matrix, and no fp32 gradient of it."""
    for fp16, same in ((False, "in_forward"), (True, "recompute")):
        auto = replace(RUN, fp16=fp16)
        resolved = replace(RUN, loss=LossConfig(gradient=same))
        assert auto.loss_recomputes == resolved.loss_recomputes == fp16
        assert time_of(auto).products_s == time_of(resolved).products_s
        memories = [loss_memory("fused_chunked", SHAPE, x, 80 << 30) for x in (auto, resolved)]
        assert memories[0] == memories[1]
    assert time_of(replace(RUN, fp16=True)).products_s > time_of(RUN).products_s


def test_recomputing_online_costs_a_product_of_each_model():
    head = 2 * SHAPE.vocab_size * SHAPE.hidden_size * TOKENS

    def products_s(gradient, teacher):
        run = replace(RUN, mode="online", loss=LossConfig(impl="fused_online", gradient=gradient))
        return step_time(
            SHAPE,
            run,
            impl="fused_online",
            gpu=gpu("h100"),
            trained_parameters=1e6,
            teacher=teacher,
            efficiency=1.0,
        ).products_s

    more = products_s("recompute", SHAPE) - products_s("in_forward", SHAPE)
    assert more == pytest.approx(2 * head / (gpu("h100").bf16_tflops * 1e12))


def test_a_loss_that_nobody_planned_has_no_plan():
    with pytest.raises(KeyError, match="unheard_of"):
        loss_memory("unheard_of", SHAPE, RUN, 80 << 30, SHAPE)
    with pytest.raises(KeyError, match="unheard_of"):
        time_of(RUN, impl="unheard_of")


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize(("mode", "reductions"), [("none", 4), ("full", 6)])
def test_messages_are_ring_all_reduces_of_the_layers_outputs(tensor, mode, reductions):
    """Two in a layer's forward pass, two in its backward pass, two where it runs again."""
    settings = replace(RUN, ranks=tensor, tensor_parallel=tensor, recompute=Recompute(mode=mode))
    output_bytes = 2 * TOKENS * 64
    sent = len(SHAPE.layers) * reductions * output_bytes * 2 * (tensor - 1) / tensor
    assert time_of(settings).messages_s == pytest.approx(sent / 450e9)


def test_recomputation_repeats_its_share_of_the_layers_forward_pass():
    def extra(recompute, stages=1):
        run = replace(RUN, ranks=stages, pipeline_parallel=stages)
        again = time_of(replace(run, recompute=recompute)).products_s - time_of(run).products_s
        once = TOKENS * forward_flops(SHAPE, 256) / (stages * 989e12 * 0.45)
        return again / once

    def block(layers):
        return Recompute(mode="full", method="block", layers=layers)

    assert extra(Recompute(mode="full")) == pytest.approx(1)
    assert extra(block(1)) == pytest.approx(1 / 4)
    assert extra(block(1), stages=2) == pytest.approx(1 / 2)
    assert extra(block(9)) == pytest.approx(1)
    layer = forward_flops(SHAPE, 256) / 4
    mlp, attention = 2 * 3 * 64 * 96, 2 * 256 * 64
    assert extra(Recompute(mode="selective", modules=("mlp",))) == pytest.approx(mlp / layer)
    assert extra(Recompute(mode="selective")) == pytest.approx(attention / layer)


def test_recomputing_the_loss_is_a_fourth_product_with_the_output_matrix():
    modes = {
        gradient: time_of(replace(RUN, loss=LossConfig(gradient=gradient)))
        for gradient in ("in_forward", "recompute")
    }
    product_s = TOKENS * 2 * 64 * 1024 / (989e12 * 0.45)
    more = modes["recompute"].products_s - modes["in_forward"].products_s
    assert more == pytest.approx(product_s)
    assert modes["recompute"].model_flops == modes["in_forward"].model_flops
