"""The console that tools print tables to."""

from rich.console import Console

LINE_WIDTH = 140  # of output that goes to no terminal: rich would take 80 and break the tables


def table_console() -> Console:
    """A console as wide as the terminal, or of LINE_WIDTH where the output goes to none."""
    console = Console()
    return console if console.is_terminal else Console(width=LINE_WIDTH)
