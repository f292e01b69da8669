"""What is compared, when, and what a difference means for a run.

A run compares a shrunken copy of its student, and of a resident teacher, while the host builds its
model: on its own ranks, in its own layout. A dry run and the doctor compare in one process, without
the parallel layout. `megatron-kd parity` compares the directories' own weights too.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from transformers import AutoConfig

from megatron_kd.config import DistillConfig
from megatron_kd.host import versions
from megatron_kd.host.cpu import backend as cpu_backend
from megatron_kd.host.parity import host_model, record, reference, shrunken
from megatron_kd.host.parity.comparison import ON_CPU, ON_GPU, Comparison
from megatron_kd.models.fingerprint import configuration_of, model_fingerprint
from megatron_kd.typed_mapping import ConfigError

SWITCH = "student.check_parity=false"
WEIGHTS_LENGTH = 256
"""Positions of the sequences on which a directory's own weights are compared."""
WEIGHTS_ROUNDING = 10
"""How much more rounding the layers of a whole model may add up than the few of its copy."""


def tolerance() -> float:
    """What counts as rounding on this backend."""
    return ON_CPU if cpu_backend.is_active() else ON_GPU


def models_of(config: DistillConfig) -> dict[str, str]:
    """Role → directory of the models that the host computes in a run."""
    models = {"student": config.student.hf_path}
    if config.mode == "online" and config.teacher.hf_path:
        models["teacher"] = config.teacher.hf_path
    return models


def compare_when_built(config: DistillConfig, container) -> None:
    """Have a run's models compared by the host, before it loads their weights.

    Call it before anything changes the provider of the container's model.
    """
    if not config.student.check_parity:
        _say(f"{SWITCH}: whether the host computes the student as transformers does is not checked")
        return
    layout = host_model.layout_of(container.model)
    settings = carried(config, container)
    hook = partial(
        _compare_on_ranks, config=config, layout=layout, settings=settings, provider=container.model
    )
    container.model.register_pre_wrap_hook(hook, prepend=True)


def compare_alone(config: DistillConfig, container) -> list[str]:
    """Compare a run's models in this process, without its parallel layout.

    Returns:
        One sentence on each model; nothing where the recipe switches the comparison off.

    Raises:
        ConfigError: The host computes something else, or nothing could be compared.
    """
    if not config.student.check_parity:
        return []
    settings = carried(config, container)
    said = []
    for role, path in models_of(config).items():
        subject = subject_of(path, _alone(host_model.layout_of(container.model)), settings[role])
        proof = record.known(record.key_of(subject), None)
        if proof is None:
            versions.apply_patches()
            with process_group():
                proof = prove_shrunken(role, path, subject)
            record.keep(record.key_of(subject), proof, None)
        said.append(sentence(role, proof))
    return said


def compare_weights(config: DistillConfig, container) -> Iterator[str]:
    """Compare a run's models on the ranks that were started, a shrunken copy and then the weights
    of each.

    Yields:
        On the first rank, one sentence on each comparison that agrees.

    Raises:
        ConfigError: The host computes something else, or nothing could be compared.
    """
    layout, settings = host_model.layout_of(container.model), carried(config, container)
    versions.apply_patches()
    with process_group(container.model):
        for role, path in models_of(config).items():
            subject = subject_of(path, layout, settings[role])
            weights = {"weights": model_fingerprint(path)["weights_xxh3_128"]}
            for prove, named in ((prove_shrunken, {}), (prove_weights, weights)):
                proof = prove(role, path, subject)
                if _is_first_rank():
                    record.keep(record.key_of(subject | named), proof, config.output_dir)
                    yield sentence(role, proof)


def sentence(role: str, proof: dict) -> str:
    """What a proof says, in words."""
    return (
        f"host and transformers agree on {proof['of']} of the {role} (largest difference "
        f"{proof['largest']:.0e} of the values' size; compared in {proof['seconds']:.1f} s)"
    )


def prove_shrunken(role: str, path: str, subject: dict, groups=None) -> dict:
    """Compare a shrunken copy of a directory's model on the ranks of this process group.

    Collective: every rank calls it; a rank that fails raises and ends, and its launcher the others.

    Args:
        role: What the run calls the model.
        path: Its directory.
        subject: What `subject_of` returned for it.
        groups: The run's process groups; None takes those that the host made last.

    Returns:
        The proof, the same on every rank.

    Raises:
        ConfigError: The host computes something else, or nothing could be compared.
    """
    started, layout = time.monotonic(), subject["layout"]
    with tempfile.TemporaryDirectory(prefix="megatron_kd_parity_") as folder, _run_undisturbed():
        copy = Path(folder)
        try:
            small = shrunken.write_configuration(
                Path(path),
                copy,
                ranks=layout.get("tensor_model_parallel_size") or 1,
                expert_ranks=layout.get("expert_model_parallel_size") or 1,
                stages=layout.get("pipeline_model_parallel_size") or 1,
            )
            reference.write_random_weights(copy)
            length = _divisible(shrunken.SEQUENCE_LENGTH, layout)
            ids = reference.sequences(small["vocab_size"], length, small.get("pad_token_id"))
            expected = reference.run(copy, ids)
        except shrunken.CannotShrinkError as error:
            raise ConfigError(
                f"whether the host computes the {role} {path} as transformers does cannot be "
                f"shown, as there is no small copy of it: {error}. {SWITCH} trains it unchecked"
            ) from error
        what = f"a shrunken copy of the {role} {path} ({small['model_type']})"
        found = _compare(copy, what, expected, subject, groups, tolerance())
    return found | {
        "of": "a shrunken copy",
        "model": path,
        "model_type": small["model_type"],
        "layers": small["num_hidden_layers"],
        "layout": _layout_in_short(layout),
        "seconds": round(time.monotonic() - started, 2),
    }


def prove_weights(role: str, path: str, subject: dict) -> dict:
    """Compare a directory's own weights, in fp32: needs the memory for it twice, once on the CPU of
    the first rank, once on all ranks together. Collective, as `prove_shrunken`.

    Its sequences are short: windows and scaled positions are for the shrunken copy to prove.

    Raises:
        ConfigError: The host computes something else, or nothing could be compared.
    """
    started = time.monotonic()
    length = _divisible(WEIGHTS_LENGTH, subject["layout"])
    settings = AutoConfig.from_pretrained(path)

    def on_first_rank() -> reference.Reference:
        ids = reference.sequences(settings.vocab_size, length, settings.pad_token_id)
        return reference.run(Path(path), ids)

    try:
        expected = _from_first_rank(on_first_rank)
    except shrunken.CannotShrinkError as error:
        raise ConfigError(f"transformers cannot run the {role} {path}: {error}") from error
    what = f"the {role} {path} ({settings.model_type})"
    found = _compare(Path(path), what, expected, subject, None, WEIGHTS_ROUNDING * tolerance())
    return found | {
        "of": "the weights",
        "model": path,
        "model_type": settings.model_type,
        "layers": settings.num_hidden_layers,
        "layout": _layout_in_short(subject["layout"]),
        "seconds": round(time.monotonic() - started, 2),
    }


def _compare(folder: Path, what: str, expected, subject: dict, groups, allowed: float) -> dict:
    """Run the host's model of a folder and judge it."""
    try:
        length = expected.input_ids.shape[1]
        model = host_model.build(folder, subject["layout"], subject["settings"], length, groups)
        by_layer = not cpu_backend.is_active() and bool(model[0].config.num_moe_experts)
        departures = host_model.departures(model, expected, layer_by_layer=by_layer)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
    comparison = Comparison(departures, expected.layer_kinds, allowed)
    if not comparison.agrees:
        raise ConfigError(
            f"the host computes another model than transformers for {what}: {comparison.fault()}. "
            f"What is known of each family: docs/families.md; {SWITCH} trains it all the same"
        )
    return {"largest": comparison.largest, "tolerance": allowed}


def _divisible(length: int, layout: dict) -> int:
    """The next length that ranks can share."""
    context = layout.get("context_parallel_size") or 1
    step = 2 * context * (layout.get("tensor_model_parallel_size") or 1)
    return -(-length // step) * step


def _layout_in_short(layout: dict) -> dict:
    return {
        name: value
        for name, value in layout.items()
        if name.endswith("parallel_size") and (value or 1) > 1
    }


@contextmanager
def process_group(layout=None) -> Iterator[None]:
    """The host's process groups, taken down afterwards.

    Args:
        layout: The model provider whose parallel sizes the started ranks take; None is for this
            process alone, whatever started it.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has its process groups already")
    backend = "gloo" if cpu_backend.is_active() else "nccl"
    with tempfile.TemporaryDirectory(prefix="megatron_kd_parity_") as folder:
        if not cpu_backend.is_active():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if layout is None or "WORLD_SIZE" not in os.environ:
            store = f"file://{folder}/store"
            dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
        try:
            if layout is None:
                parallel_state.initialize_model_parallel()
            else:
                layout.virtual_pipeline_model_parallel_size = None
                layout.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(0)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _compare_on_ranks(model: list, *, config, layout, settings, provider) -> list:
    """Pre-wrap hook of the run's own model, which it leaves as it is."""
    for role, path in models_of(config).items():
        subject = subject_of(path, layout, settings[role])
        key = record.key_of(subject)
        # One rank decides for all: the others' machines may remember other proofs.
        proof = _from_first_rank(lambda key=key: record.known(key, config.output_dir))
        if proof is None:
            proof = prove_shrunken(role, path, subject, host_model.process_groups(provider))
            _say(sentence(role, proof))
        if _is_first_rank():
            record.keep(key, proof, config.output_dir)
    return model


def _from_first_rank(make):
    found = [make() if _is_first_rank() else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def carried(config: DistillConfig, container) -> dict[str, dict]:
    """Role → settings of its model that the recipe overrides; a teacher has none."""
    settings = host_model.carried_settings(
        container.model, config.student.hf_path, cpu_backend.is_active()
    )
    return {"student": settings, "teacher": {}}


def subject_of(path: str, layout: dict, settings: dict) -> dict:
    """All that a proof depends on, but for what is installed."""
    return {
        "configuration": configuration_of(path),
        "layout": layout,
        "settings": settings,
        "backend": "cpu" if cpu_backend.is_active() else torch.cuda.get_device_name(),
    }


def _alone(layout: dict) -> dict:
    """The layout of one rank."""
    alone = {}
    for name, value in layout.items():
        if name.endswith("parallel_size"):
            value = 1
        alone[name] = False if name == "sequence_parallel" else value
    return alone


@contextmanager
def _run_undisturbed() -> Iterator[None]:
    """The run goes on as if nothing had been compared: its random numbers, and the variables by
    which the host tells Transformer Engine which attention to take.
    """
    environment = dict(os.environ)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    before, states = torch.get_rng_state(), tracker.get_states()
    device = None if cpu_backend.is_active() else torch.cuda.get_rng_state()
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            if name.startswith("NVTE_"):
                del os.environ[name]
        torch.set_rng_state(before)
        tracker.set_states(states)
        if device is not None:
            torch.cuda.set_rng_state(device)


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _say(what: str) -> None:
    if _is_first_rank():
        print(f"megatron_kd: {what}", file=sys.stderr, flush=True)
