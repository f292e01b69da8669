"""Check this machine, and a recipe on it: versions, GPUs, tokenizers, vocabulary, cache, disk.

Prints one line per check with what to do about it; the exit status is 1 where a run would fail.
Example:
  megatron-kd doctor recipes/quickstart.yaml bridge.train.train_iters=100
"""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_kd.config import from_recipe
from megatron_kd.tools.doctor.finding import Finding
from megatron_kd.typed_mapping import ConfigError

STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


def add_arguments(parser) -> None:
    parser.add_argument("recipe", nargs="?", help="the YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a run")


def run(args) -> int:
    findings = list(_findings(args))
    console = Console()
    table = Table(show_lines=False)
    for column in ("", "check", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(  # Text: what was found is not markup
            Text(finding.level, STYLES[finding.level]),
            *map(Text, (finding.subject, finding.detail, finding.remedy)),
        )
    console.print(table)
    counts = {level: sum(f.level == level for f in findings) for level in STYLES}
    console.print(f"{counts['fault']} faults, {counts['warning']} warnings", highlight=False)
    return 1 if counts["fault"] else 0


def _findings(args):
    from megatron_kd.tools.doctor.machine import check_machine

    host_imports = True
    for finding in check_machine():
        host_imports = host_imports and (finding.subject, finding.level) != ("host", "fault")
        yield finding
    if not args.recipe:
        return
    try:
        config = from_recipe(args.recipe, args.overrides)
    except ConfigError as error:
        yield Finding("fault", "recipe", str(error), "see the message")
        return
    if host_imports:
        from megatron_kd.tools.doctor.recipe import check_recipe

        yield from check_recipe(config)
