"""Which of the host's warnings a user need not read, each with the reason; all others are shown.

They are hidden one by one, by their words and where they come from, never by their kind: what a
recipe causes, such as a warm-up longer than the run, stays in the log. What says that a GPU's
software is missing is hidden on the CPU backend alone.
"""

import logging
import os
import re
import warnings
from typing import NamedTuple


class Unconcerning(NamedTuple):
    """A warning that says nothing about the user's run."""

    words: str
    """Regular expression that the message begins with."""
    reason: str
    logger: str | None = None
    """Name of the logger it comes from; None: it comes through Python's `warnings`."""
    in_children: bool = False
    """Also in Python processes that this one starts, by PYTHONWARNINGS: `words` are plain then."""


ALWAYS = (
    Unconcerning(
        "The pynvml package is deprecated", "ModelOpt requires that package", in_children=True
    ),
    Unconcerning(
        r".*torch_dtype. is deprecated", "the host asks", "transformers.configuration_utils"
    ),
    Unconcerning(
        "Detected an existing checkpoint in",
        "0.3 saves the last iteration twice, by a process of its own",
        in_children=True,
    ),
    Unconcerning(
        "Could not determine (rank|world size|local rank|master address|master port)",
        "a command without torchrun is one rank, as its help says",
    ),
    Unconcerning(".*'?pretrain'? is experimental", "the function that every run calls"),
    Unconcerning("MimoModelConfig is experimental", "the host imports it, nothing here uses it"),
    Unconcerning("full scope is deprecated. Use empty cuda_graph", "the host's own default"),
    Unconcerning("`build_tokenizer` is deprecated", "the host calls it"),
    Unconcerning("`torch.distributed.all_gather_into_tensor` is dep", "the host calls it"),
    Unconcerning(
        r"TrainingConfig\.eval_(iters|interval) is deprecated",
        "where both hosts take these keys, so recipes keep them there",
    ),
)
ON_CPU = (
    Unconcerning("When using async grad allreduce it is recommended", "an order of GPU queues"),
    Unconcerning("Transformer Engine and Apex are not installed", "they need a GPU"),
    Unconcerning("Apex is not installed", "it needs a GPU"),
    Unconcerning("The legacy GroupedMLP will be deprecated", "the other needs Transformer Engine"),
    Unconcerning("Only transformer-engine>=1.7.0 supports MoE", "it needs a GPU"),
    Unconcerning("Your device is potentially cap", "Triton, which needs a GPU"),
    Unconcerning(
        "gradient_accumulation_fusion requires",
        "a kernel for GPUs",
        "megatron.bridge.utils.fusions",
    ),
    Unconcerning(
        "Import of FP8GlobalStateManager",
        "Transformer Engine, which needs a GPU",
        "megatron.bridge.utils.import_utils",
    ),
)


class _Hide(logging.Filter):
    def __init__(self, words: str):
        super().__init__()
        self.words = words

    def filter(self, record: logging.LogRecord) -> bool:
        return re.match(self.words, record.getMessage(), re.IGNORECASE) is None


def hide(on_cpu: bool) -> None:
    """Hide them in this process, and those marked so in Python processes that it starts.

    Args:
        on_cpu: The CPU backend is active.
    """
    for each in ALWAYS + (ON_CPU if on_cpu else ()):
        if each.logger is None:
            warnings.filterwarnings("ignore", message=each.words)
        else:
            logger = logging.getLogger(each.logger)
            if not any(getattr(known, "words", None) == each.words for known in logger.filters):
                logger.addFilter(_Hide(each.words))
    hidden = os.environ.get("PYTHONWARNINGS", "").split(",")
    hidden += [f"ignore:{each.words}" for each in ALWAYS if each.in_children]
    os.environ["PYTHONWARNINGS"] = ",".join(dict.fromkeys(filter(None, hidden)))
