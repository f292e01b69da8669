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


def check_logits_multiplied_behind_the_output_layer_are_refused_beside_a_teacher(folder):
    from megatron_kd.host.checks.online import _check_logits as check_logits
    from megatron_kd.typed_mapping import ConfigError

    check_logits(SimpleNamespace(), "student")
    check_logits(SimpleNamespace(use_mup=False, mup_output_mult=0.5), "student")
    check_logits(SimpleNamespace(use_mup=True, mup_output_mult=1.0), "student")
    with pytest.raises(ConfigError, match="the student .* mup_output_mult=0.5 .* distil offline"):
        check_logits(SimpleNamespace(use_mup=True, mup_output_mult=0.5), "student")
    with pytest.raises(ConfigError, match="the teacher .* lm_head_multiplier=0.25"):
        check_logits(SimpleNamespace(lm_head_multiplier=0.25), "teacher")


def check_a_vocabulary_is_split_as_it_stands(folder):
    from megatron_kd.host.checks.layout import _check_vocabulary as check_vocabulary
    from megatron_kd.typed_mapping import ConfigError

    def split(rows, ranks, **tokenizer):
        model = SimpleNamespace(vocab_size=rows, tensor_model_parallel_size=ranks)
        check_vocabulary(SimpleNamespace(model=model, tokenizer=SimpleNamespace(**tokenizer)))

    split(398, 2)
    split(397, 1)
    split(397, 2, use_tokenizer_vocab_size=True)
    with pytest.raises(
        ConfigError, match=r"397 output rows .*model.resize_token_embeddings\(398\)"
    ):
        split(397, 2)


def check_experts_beside_tensor_ranks_need_sequence_parallelism(folder):
    from megatron_kd.host.checks.layout import _check_experts as check_experts
    from megatron_kd.typed_mapping import ConfigError

    def experts(number, tensor, sequence):
        check_experts(
            SimpleNamespace(
                num_moe_experts=number,
                tensor_model_parallel_size=tensor,
                sequence_parallel=sequence,
            )
        )

    experts(None, 2, False)
    experts(8, 1, False)
    experts(8, 2, True)
    with pytest.raises(ConfigError, match="set bridge.model.sequence_parallel=true"):
        experts(8, 2, False)


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


def container_of(*, apart=False, sharded=False, **model):
    """The host's own configuration objects, as far as checks of GPUs' software read them."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training.config import (
        DistributedDataParallelConfig,
        DistributedInitConfig,
    )

    from megatron_kd.data.dataset import SampleOptions
    from megatron_kd.host.dataset_provider import DistillDatasetProvider

    model = {"num_attention_heads": 4, "num_query_groups": 2} | model
    return SimpleNamespace(
        model=GPTModelProvider(num_layers=2, hidden_size=64, **model),
        ddp=DistributedDataParallelConfig(use_megatron_fsdp=sharded),
        dist=DistributedInitConfig(),
        dataset=DistillDatasetProvider(samples=SampleOptions(documents_apart=apart)),
    )


def check_one_queue_and_fully_sharded_weights_exclude_each_other(folder):
    from megatron_kd.host.checks.gpu_software import CONNECTIONS, check_gpu_software
    from megatron_kd.typed_mapping import ConfigError

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONNECTIONS, "1")
        check_gpu_software(container_of())
        with pytest.raises(ConfigError, match=f"unset {CONNECTIONS}"):
            check_gpu_software(container_of(sharded=True))
        patch.setenv(CONNECTIONS, "8")
        check_gpu_software(container_of(sharded=True))
        patch.delenv(CONNECTIONS)
        check_gpu_software(container_of(sharded=True))


def check_an_engine_whose_packed_attention_gives_nan_is_refused(folder):
    import importlib.metadata

    from megatron_kd.host.checks.gpu_software import check_gpu_software
    from megatron_kd.typed_mapping import ConfigError

    meets_it = {"apart": True, "context_parallel_size": 2}
    misses_it = [
        meets_it | {"apart": False},
        meets_it | {"context_parallel_size": 1},
        meets_it | {"num_query_groups": 4},
        meets_it | {"num_query_groups": None},
    ]
    installed = importlib.metadata.version
    with pytest.MonkeyPatch.context() as patch:

        def engine(version):
            found = {"transformer-engine": version}
            patch.setattr(importlib.metadata, "version", lambda x: found.get(x) or installed(x))

        for version in ("2.9.0+70f53666", "2.10.0", "2.10.0.dev0+769ed778"):
            engine(version)
            for options in misses_it:
                check_gpu_software(container_of(**options))
            with pytest.raises(
                ConfigError, match=r"gives NaN .* Transformer Engine 2\.11 or later"
            ):
                check_gpu_software(container_of(**meets_it))
        for version in ("2.8.0", "2.11.0+c188b533", "2.12.0+5671fd36"):
            engine(version)
            check_gpu_software(container_of(**meets_it))
    check_gpu_software(container_of(**meets_it))  # none is installed here


def check_fusion_without_its_kernel_is_off_by_default_and_refused_where_asked_for(folder):
    from megatron_kd.host.checks.gpu_software import check_gpu_software
    from megatron_kd.host.container import _adapt_provider as adapt_provider
    from megatron_kd.host.cpu import backend
    from megatron_kd.typed_mapping import ConfigError

    fused = {"gradient_accumulation_fusion": True}  # the default beside Transformer Engine on 0.6
    provider = container_of(**fused).model
    adapt_provider(provider, "student", load_weights=False, on_cpu=False)
    assert provider.gradient_accumulation_fusion is False
    check_gpu_software(container_of(**fused))  # this machine is not the one with the GPUs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "is_active", lambda: False)
        with pytest.raises(ConfigError, match="APEX's kernel fused_weight_gradient_mlp_cuda"):
            check_gpu_software(container_of(**fused))
        (folder / "fused_weight_gradient_mlp_cuda.py").touch()
        patch.syspath_prepend(folder)
        check_gpu_software(container_of(**fused))
        provider = container_of(**fused).model
        adapt_provider(provider, "student", load_weights=False, on_cpu=False)
        assert provider.gradient_accumulation_fusion is True


def check_a_graph_of_a_whole_iteration_is_refused(folder):
    from megatron.core.transformer import enums

    from megatron_kd.config import from_recipe
    from megatron_kd.host.checks.features import check_features
    from megatron_kd.typed_mapping import ConfigError

    recipe = folder / "recipe.yaml"
    recipe.write_text("{output_dir: run, student: {hf_path: s}, cache: {path: c}, mode: offline}")
    config = from_recipe(recipe)
    fields = dict.fromkeys(("cuda_graph_scope", "cuda_graph_modules"))
    graphs = [{"cuda_graph_impl": "full_iteration"}]
    layers = [{}, {"cuda_graph_impl": "local"}, {"cuda_graph_impl": "transformer_engine"}]
    own = enums.CudaGraphScope
    for field in fields.keys() & container_of().model.__dataclass_fields__.keys():
        local = {"cuda_graph_impl": "local"}
        graphs += [local | {field: x} for x in ("full_iteration", ["full_iteration"])]
        graphs += [local | {field: x} for x in (own.full_iteration, [own.full_iteration])]
        layers += [local | {field: x} for x in ("attn", "attn,mlp", [own.attn])]

    def check(settings):
        container = container_of()
        for name, value in settings.items():
            setattr(container.model, name, value)
        check_features(config, container, on_cpu=False)

    for settings in layers:
        check(settings)
    for settings in graphs:
        with pytest.raises(ConfigError, match="cannot record a distillation step"):
            check(settings)


CHECKS = parts.names_of(globals())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return parts.results_of(__name__, tmp_path_factory.mktemp("parts"))


@pytest.mark.parametrize("name", CHECKS)
def test_part(results, name):
    assert results[name] is None, results[name]
