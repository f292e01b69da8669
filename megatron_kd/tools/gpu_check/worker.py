"""One part in a process of its own: `python -m … NAME SETTINGS OUTCOME`; SETTINGS is JSON."""

import json
import sys
import traceback
from pathlib import Path

from megatron_kd.tools.gpu_check.part import FAILED, Outcome, Settings, write
from megatron_kd.tools.gpu_check.parts import PARTS


def main(name: str, settings: str, path: str) -> None:
    try:
        outcome = PARTS[name].run(Settings(**json.loads(settings)))
    except Exception:
        outcome = Outcome(FAILED, ["```", *traceback.format_exc().splitlines()[-15:], "```"])
    write(Path(path), outcome)


if __name__ == "__main__":
    main(*sys.argv[1:])
