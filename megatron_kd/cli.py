"""The `megatron-kd` command: a table of sub-commands, each imported only when it is called.

A sub-command is a module with `add_arguments(parser)` and `run(args) -> int` (the exit status). Its
docstring's first line is its help text.
"""

import argparse
import difflib
import importlib
import sys
import warnings

from megatron_kd.full_disk import full_disk
from megatron_kd.teacher.engines import ENGINES

COMMANDS = {
    # name: (module, one-line help; the module is imported only when its command is used)
    "prepare": ("megatron_kd.data.prepare.command", "text, chat or token data to sequences"),
    "init-student": ("megatron_kd.models.init_student", "make a compact student from a teacher"),
    "import-gguf": ("megatron_kd.models.gguf", "a GGUF file as a Hugging Face directory"),
    "capture": (
        "megatron_kd.teacher.capture.command",
        "run the teacher once, cache its top K",
    ),
    "verify": ("megatron_kd.cache.verify", "check every byte of a cache; repair what is broken"),
    "inspect": ("megatron_kd.cache.inspect", "show what a cache holds, as a table and a PNG"),
    "convert": ("megatron_kd.data.convert.command", "another tool's captures as a cache"),
    "plan": ("megatron_kd.tools.planning.plan_command", "memory, time and cache size of a recipe"),
    "bench": (
        "megatron_kd.tools.benchmark.sweep",
        "time and memory of the losses, as CSV",
    ),
    "plot": ("megatron_kd.tools.benchmark.plot", "a benchmark's CSV as a PNG"),
    "export": ("megatron_kd.host.export", "a checkpoint as a Hugging Face directory"),
    "doctor": ("megatron_kd.tools.doctor.doctor_command", "check this machine, and a recipe on it"),
    "report": (
        "megatron_kd.tools.report.report_command",
        "what a run achieved, as a table and a PNG",
    ),
    "compare": (
        "megatron_kd.tools.report.compare",
        "loss curves of runs against the first",
    ),
    "study": (
        "megatron_kd.tools.report.study",
        "variants over seeds: train, score, report",
    ),
    "retained": (
        "megatron_kd.tools.report.evaluation",
        "benchmark scores beside the teacher's",
    ),
    "held-out-kl": (
        "megatron_kd.tools.report.held_out",
        "KL(teacher || student) on held-out data",
    ),
}

ENGINES["megatron"] = "megatron_kd.host.megatron_engine.engine:MegatronEngine"


def recapture(folder, shards) -> dict:
    """What `verify --repair` captures shards again with; see `megatron_kd.cache.verify`."""
    from megatron_kd.teacher.capture.shards import recapture  # loads PyTorch

    return recapture(folder, shards)


HANDED = {"verify": {"recapture": recapture}}
"""Command: what it is handed because it must not import it."""


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="megatron-kd", description=__doc__.splitlines()[0])
    parser.add_argument(
        "command", choices=sorted(COMMANDS), metavar="COMMAND", help=", ".join(COMMANDS)
    )
    parser.epilog = "\n".join(f"{name}: {text}" for name, (_, text) in COMMANDS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    arguments = sys.argv[1:] if argv is None else list(argv)
    first = arguments[0] if arguments else ""
    near = difflib.get_close_matches(first, COMMANDS, n=1)
    if near and first not in COMMANDS:
        parser.error(f"no command {first!r}; did you mean {near[0]}?")
    name = parser.parse_args(arguments[:1]).command
    # nvidia-modelopt depends on a package whose mere presence makes PyTorch warn at every start.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    command = importlib.import_module(COMMANDS[name][0])
    args = parser_of(name, command).parse_args(arguments[1:])
    try:
        return command.run(args, **HANDED.get(name, {}))
    except (ValueError, OSError) as error:  # bad input: the message is the whole story
        print(f"megatron-kd {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"megatron-kd {name}: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        said = full_disk(error)
        if said is None:
            raise
        print(f"megatron-kd {name}: {said}. Make room and run it again", file=sys.stderr)
        return 1


def parser_of(name: str, command) -> argparse.ArgumentParser:
    """The arguments of one sub-command, whose module is `command`."""
    parser = argparse.ArgumentParser(prog=f"megatron-kd {name}", description=command.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
