"""Run several command lines of megatron-kd, read as JSON from standard input, one after another:
prints for each a line of JSON, the exit status and the output with its white space folded.
"""

import contextlib
import io
import json
import sys

from megatron_kd import cli


def main() -> None:
    for arguments in json.load(sys.stdin):
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = cli.main(arguments)
        print(f"ANSWER {json.dumps([status, ' '.join(output.getvalue().split())])}")


if __name__ == "__main__":
    main()
