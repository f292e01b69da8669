"""`python -m megatron_kd COMMAND …`, which is what torchrun starts on every rank."""

import sys

from megatron_kd.cli import main

# Checkpoint saving starts processes that import this module again.
if __name__ == "__main__":
    sys.exit(main())
