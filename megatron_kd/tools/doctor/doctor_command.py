"""Check this machine, and a recipe on it: versions, GPUs, tokenizers, vocabulary, cache, disk.

Prints one line per check with what to do about it; the exit status is 1 where a run would fail.
Example:
  megatron-kd doctor recipes/quickstart.yaml bridge.train.train_iters=100
"""

from collections.abc import Iterator
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from megatron_kd.stages import stages_of
from megatron_kd.tools.console import table_console
from megatron_kd.tools.doctor.finding import Finding
from megatron_kd.typed_mapping import ConfigError

KEEP_HOST_OUT = ("host", "transformers", "Transformer Engine")
"""Subjects of findings that, at fault, keep the host from being imported."""

STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


def add_arguments(parser) -> None:
    parser.add_argument("recipe", nargs="?", help="the YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for a run")


def run(args) -> int:
    findings = list(_findings(args))
    console = table_console()
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


def _findings(args) -> Iterator[Finding]:
    """The machine's findings, then those of the recipe, which the host itself has to read."""
    from megatron_kd.tools.doctor.machine import check_machine

    stages, recipe_fault = [], None
    if args.recipe:
        try:
            stages = stages_of(args.recipe, args.overrides)
        except ConfigError as error:
            recipe_fault = Finding("fault", "recipe", str(error), "see the message")
    host_works = True
    for finding in check_machine(with_host=recipe_fault is None):
        host_works &= finding.level != "fault" or finding.subject not in KEEP_HOST_OUT
        yield finding
    if recipe_fault is not None:
        yield recipe_fault
    elif stages and host_works:
        from megatron_kd.tools.doctor.recipe import check_recipe

        for stage in stages:
            for finding in check_recipe(stage.config, stage if stage.count > 1 else None):
                named = f"{finding.subject}, {stage.name}" if stage.count > 1 else finding.subject
                yield replace(finding, subject=named)
