"""The command line: `megatron-kd COMMAND`, or `torchrun … -m megatron_kd COMMAND` on several ranks.

Every command is a module with `add_arguments(parser)` and `run(args)`, which returns the exit
status; its docstring is the command's help. A module is imported when its command is called, so
that a command waits only for the packages it needs itself.
"""

import argparse
import difflib
import importlib
import sys
import warnings
from typing import NamedTuple

from megatron_kd.extras import MissingExtra, remedy
from megatron_kd.full_disk import full_disk
from megatron_kd.teacher.engines import ENGINES


class Command(NamedTuple):
    """One command: the module that has it, and what it does in a few words."""

    module: str
    summary: str


MAIN_COMMANDS = {
    "prepare": Command("megatron_kd.data.prepare.command", "text, chats or tokens to sequences"),
    "capture": Command("megatron_kd.teacher.capture.command", "run the teacher, cache its top K"),
    "plan": Command("megatron_kd.tools.planning.plan_command", "memory and time of a recipe"),
    "distill": Command("megatron_kd.host.distill_command", "train a student by a recipe"),
    "export": Command("megatron_kd.host.export", "a checkpoint as a Hugging Face directory"),
}
MODEL_AND_CACHE_COMMANDS = {
    "generate": Command("megatron_kd.teacher.generate.command", "prompts to a model's responses"),
    "init-student": Command("megatron_kd.models.init_student", "cut a student from its teacher"),
    "import-gguf": Command("megatron_kd.models.gguf", "a GGUF file as a Hugging Face directory"),
    "convert": Command("megatron_kd.data.convert.command", "another tool's captures as a cache"),
    "verify": Command("megatron_kd.cache.verify", "check every byte of a cache, and repair it"),
    "inspect": Command("megatron_kd.cache.inspect", "what a cache holds, as a table and a PNG"),
}
RUN_COMMANDS = {
    "doctor": Command("megatron_kd.tools.doctor.doctor_command", "check this machine and a recipe"),
    "parity": Command("megatron_kd.host.parity_command", "host against transformers, by weights"),
    "report": Command("megatron_kd.tools.report.report_command", "losses, speed, memory of a run"),
    "compare": Command("megatron_kd.tools.report.compare", "loss curves against the first run's"),
    "study": Command("megatron_kd.tools.report.study", "variants over seeds: train, score, report"),
    "held-out-kl": Command("megatron_kd.tools.report.held_out", "KL to the teacher on other data"),
    "retained": Command("megatron_kd.tools.report.evaluation", "benchmark scores by the teacher's"),
}
GROUPS = {
    "from data to a student, in this order": MAIN_COMMANDS,
    "data, models and caches": MODEL_AND_CACHE_COMMANDS,
    "machines and runs": RUN_COMMANDS,
}
COMMANDS = MAIN_COMMANDS | MODEL_AND_CACHE_COMMANDS | RUN_COMMANDS
DEVELOPER_COMMANDS = {
    "bench": Command("megatron_kd.tools.benchmark.sweep", "time and memory of the losses, as CSV"),
    "plot": Command("megatron_kd.tools.benchmark.plot", "a table of bench as a PNG"),
    "gpu-check": Command("megatron_kd.tools.gpu_check.command", "check a machine with GPUs"),
}

ENGINES["megatron"] = "megatron_kd.host.megatron_engine.engine:MegatronEngine"


def recapture(folder, shards) -> dict:
    """Capture shards of a cache again, or the whole of it: `megatron_kd.teacher.capture.shards`."""
    from megatron_kd.teacher.capture.shards import recapture  # loads PyTorch

    return recapture(folder, shards)


TELLS_ITS_BAD_INPUT = {"distill"}
"""Commands that print what is wrong with their input themselves: whatever else they raise is a
fault, whose traceback is kept."""

HANDED = {"verify": {"recapture": recapture}}
"""Command: further arguments of its `run`, which its own package stands too low to import."""


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after the program's name; None takes the process's own.

    Returns:
        The exit status: 0 it worked, 1 it did not, 2 the command line is wrong, 130 interrupted.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    # nvidia-modelopt depends on a package whose mere presence makes PyTorch warn at every start.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    name, command, arguments = find_command(words)
    try:
        return parse_and_run(name, command, arguments)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        to_install = _remedy(error)
        is_fault = isinstance(error, ModuleNotFoundError) or name in TELLS_ITS_BAD_INPUT
        if is_fault and not to_install and not isinstance(error, MissingExtra):
            raise  # of this package, of the host or of the installation, not of the command line
        # Bad input: the message is the whole story.
        print(f"megatron-kd {name}: {error}{to_install}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"megatron-kd {name}: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        message = full_disk(error)
        if message is None:
            raise
        print(f"megatron-kd {name}: {message}. Make room and run it again", file=sys.stderr)
        return 1


def _remedy(error: BaseException) -> str:
    """How to install the package whose absence is the error, or its cause; '' where that is
    another, or the error says it already."""
    absence = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    if not isinstance(absence, ModuleNotFoundError):
        return ""
    found = remedy(absence.name or "")
    return "" if found is None or isinstance(absence, MissingExtra) else f": {found}"


def find_command(words: list[str]) -> tuple[str, Command, list[str]]:
    """The command that a command line begins with.

    Returns:
        Its name, with `dev` before it where it is a developer's; the command; the words after it.
        Where there is none, the process ends with the list of commands or the nearest name.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-kd",
        usage="megatron-kd COMMAND …   (a large language model into a small one)",
        epilog="\n".join(overview()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    first, *rest = words or ["--help"]
    table, prefix = COMMANDS, ""
    if first == "dev":
        parser.usage = "megatron-kd dev COMMAND …"
        parser.description = "For work on this package itself."
        parser.epilog = "\n".join(_lines(DEVELOPER_COMMANDS))
        table, prefix = DEVELOPER_COMMANDS, "dev "
        first, *rest = rest or ["--help"]
    if first in ("-h", "--help"):
        parser.print_help()
        sys.exit(0 if words else 2)
    if first not in table:
        parser.error(_unknown(prefix, first, table))
    return prefix + first, table[first], rest


def _unknown(prefix: str, name: str, table: dict[str, Command]) -> str:
    if name in DEVELOPER_COMMANDS:
        return f"{name} is a developer's command: megatron-kd dev {name}"
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(table)}"
    return f"no command {prefix}{name!r}; {hint}"


def overview() -> list[str]:
    """Lines that name every command by group."""
    lines = []
    for title, commands in GROUPS.items():
        lines += [f"{title}:", *_lines(commands)]
    return [*lines, "megatron-kd COMMAND --help tells more; megatron-kd dev: benchmarks and plots"]


def _lines(commands: dict[str, Command]) -> list[str]:
    return [f"  {name:<14}{command.summary}" for name, command in commands.items()]


def parse_and_run(name: str, command: Command, arguments: list[str]) -> int:
    """Import a command's module, parse its arguments and run it; returns the exit status."""
    module = importlib.import_module(command.module)
    args = parser_of(name, module).parse_intermixed_args(arguments)
    return module.run(args, **HANDED.get(name, {}))


def parser_of(name: str, module) -> argparse.ArgumentParser:
    """The parser of one command's arguments.

    Args:
        name: The command as a user types it, for the usage line.
        module: The command's module.
    """
    parser = argparse.ArgumentParser(prog=f"megatron-kd {name}", description=module.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.add_arguments(parser)
    return parser


if __name__ == "__main__":  # `python -m megatron_kd.cli` is the older spelling of `-m megatron_kd`
    sys.exit(main())
