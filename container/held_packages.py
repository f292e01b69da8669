"""The packages that a GPU image brings in CUDA builds, and that pip must leave alone.

`held_packages.py` prints them as pip's constraints; `--without LIST` prints a list of requirements
less those packages; `--check FILE` ends with an error if one of FILE's has another version by now.
Only Python's standard library: it runs before anything is installed.
"""

import argparse
import importlib.metadata
import re
import sys
from pathlib import Path

HELD = (
    "apex",
    "flash-attn",
    "numpy",
    "pytorch-triton",
    "torch",
    "torchvision",
    "transformer-engine",
    "transformer-engine-torch",
    "triton",
)


def normalized(name: str) -> str:
    """A distribution's name as PEP 503 compares it: lower case, one hyphen for `-`, `_` and `.`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def held_versions() -> dict[str, str]:
    """The version of each package of `HELD` that is installed."""
    return {
        name: distribution.version
        for distribution in importlib.metadata.distributions()
        if (name := normalized(distribution.metadata["Name"])) in HELD
    }


def without_held(requirements: str) -> str:
    """The lines of a requirements file that do not name a package of `HELD`.

    `triton` and `pytorch-triton` are the same package under two names, so either stands for both,
    and a package that the image lacks is not installed in its build for CPUs either.
    """
    lines = requirements.splitlines()
    return "\n".join(
        line for line in lines if normalized(re.split(r"[^\w.-]", line, maxsplit=1)[0]) not in HELD
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The packages that pip leaves as the image has them"
    )
    parser.add_argument("--without", type=Path, metavar="LIST")
    parser.add_argument("--check", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.without:
        print(without_held(arguments.without.read_text()))
        return
    now = [f"{name}=={version}" for name, version in sorted(held_versions().items())]
    if arguments.check is None:
        print("\n".join(now))
        return
    before = arguments.check.read_text().split()
    if now != before:
        sys.exit(
            f"expected the image's own packages, {before}, but pip left {now}: take what asked for "
            "another version out of scripts/requirements, and build from the base image again"
        )


if __name__ == "__main__":
    main()
