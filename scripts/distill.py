"""The command `megatron-kd distill` as a file: torchrun scripts/distill.py RECIPE key=value …"""

import sys

from megatron_kd.cli import main

if __name__ == "__main__":  # checkpoint saving starts processes that import this file again
    sys.exit(main(["distill", *sys.argv[1:]]))
