"""What a module for one version of the host says about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

ModelHook = Callable[[list], list]


@dataclass(frozen=True, kw_only=True)
class Host:
    """One version of the host. Functions import what they need of it when they are called."""

    bridge: str
    """The version of megatron-bridge that is tested."""

    core: str
    """The version of megatron-core that is tested with it."""

    batch_on_this_cp_rank: Callable
    """(batch, cp_group) → this context-parallel rank's part of every tensor, cut along dimension
    1."""

    convert_to_distillation: Callable
    """(student, teacher, kd_config, attach) → ModelOpt's provider of both models, with `attach`
    among the hooks that run on the converted model."""

    evaluates_online_pipelines: bool
    """Whether evaluation sizes the messages between pipeline stages for student and teacher."""

    shares_data_iterators: bool
    """Whether all chunks of a virtual pipeline read one data iterator, which the host's loop
    splits; else it wants a list with one for each chunk."""

    gemma3_window_counts_query: bool
    """Whether Gemma 3's `window_size` counts the query's own key, as transformers does, and the
    host takes it off; else a window holds the keys before the query."""

    patches: tuple[Callable[[], None], ...] = ()
    """Changes to the host's own code that are active on GPUs too. It offers no hook for these."""

    model_hooks: tuple[ModelHook, ...] = ()
    """Run on the model once it is built and its weights are loaded."""

    cpu_stand_ins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """CUDA-only package → the modules of the host that import it without a guard, and get a
    stand-in for it on the CPU backend (`cpu.import_stand_ins`)."""

    prepare_python: Callable[[], None] = lambda: None
    """Called before the host is imported on the CPU backend."""
