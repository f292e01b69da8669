"""Checks before a start one by one, on stand-ins for the host's configuration: no ranks, no run."""

import contextlib
import json
from types import SimpleNamespace

import parts
import pytest
import torch


def resumed(folder, load):
    """A run with other data than its record says, and its container that loads from `load`."""
    from megatron_kd.host.checks.identity import IDENTITY

    config = SimpleNamespace(
        output_dir=str(folder / "run"), mode="offline", student=SimpleNamespace(lora=None)
    )
    container = SimpleNamespace(
        model=SimpleNamespace(vocab_size=11, seq_length=8),
        dataset=SimpleNamespace(open=lambda split: SimpleNamespace(fingerprint="now")),
        checkpoint=SimpleNamespace(load=load),
    )
    before = {"mode": "offline", "source_fingerprint": "before"}
    (folder / "run").mkdir()
    (folder / "run" / IDENTITY).write_text(json.dumps(before))
    return config, container


def check_a_checkpoint_that_is_loaded_binds_the_run(folder):
    from megatron_kd.host.checks.identity import check_identity
    from megatron_kd.typed_mapping import ConfigError

    config, container = resumed(folder, load=str(folder / "elsewhere"))
    check_identity(config, container)  # nothing there yet
    (folder / "elsewhere" / "iter_0000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="was before, now it is now"):
        check_identity(config, container)


def check_the_working_directory_is_no_place_of_checkpoints(folder):
    from megatron_kd.host.checks.identity import check_identity
    from megatron_kd.typed_mapping import ConfigError

    config, container = resumed(folder, load=None)
    (folder / "iter_0000001").mkdir()
    with contextlib.chdir(folder):
        check_identity(config, container)
    (folder / "run" / "checkpoints" / "iter_0000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="was before, now it is now"):
        check_identity(config, container)


def check_a_student_that_caps_its_logits_is_refused_to_losses_that_would_not(folder):
    from megatron_kd.host.checks.features import check_features
    from megatron_kd.typed_mapping import ConfigError

    def features(mode, impl, cap):
        config = SimpleNamespace(
            mode=mode,
            profile=None,
            loss=SimpleNamespace(impl=impl),
            selection=SimpleNamespace(keep_best=False),
            student=SimpleNamespace(lora=None),
        )
        model = SimpleNamespace(tensor_model_parallel_size=1, final_logit_softcapping=cap)
        check_features(config, SimpleNamespace(model=model), on_cpu=True)

    for impl in ("dense", "sparse_chunked", "fused_chunked"):
        features("offline", impl, None)
    features("offline", "sparse_chunked", 30.0)
    with pytest.raises(ConfigError, match="set loss.impl=dense or sparse_chunked"):
        features("offline", "fused_chunked", 30.0)
    with pytest.raises(ConfigError, match="set loss.impl=dense$"):
        features("online", "fused_online", 30.0)


def check_the_fewest_ranks_hold_whole_replicas_and_whole_experts(folder):
    from megatron_kd.host.checks.by_host import fewest_ranks

    def ranks(tensor=1, pipeline=1, context=1, expert=None, expert_tensor=None):
        return fewest_ranks(
            SimpleNamespace(
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=pipeline,
                context_parallel_size=context,
                expert_model_parallel_size=expert,
                expert_tensor_parallel_size=expert_tensor,
            )
        )

    assert ranks(tensor=2, pipeline=3, context=2) == 12
    assert ranks(tensor=4, expert=6, expert_tensor=1) == 12
    assert ranks(tensor=4, expert=6) == 24  # experts are split as the rest is
    assert ranks(tensor=4, pipeline=2, expert=6, expert_tensor=1) == 24


def check_shards_without_a_mark_are_refused(folder):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from megatron_kd.host.sharded_weights import UnmarkedShardsError, refuse_unmarked

    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)  # its own __init__ needs ranks
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.zeros(2, 3))
    model = [torch.nn.Sequential(torch.nn.Linear(3, 3), layer)]
    with pytest.raises(UnmarkedShardsError, match="1 weights are split .* marked so, 1 first"):
        refuse_unmarked(model)
    layer.weight.tensor_model_parallel = True
    assert refuse_unmarked(model) is model


CHECKS = parts.names_of(globals())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return parts.results_of(__name__, tmp_path_factory.mktemp("parts"))


@pytest.mark.parametrize("name", CHECKS)
def test_part(results, name):
    assert results[name] is None, results[name]
