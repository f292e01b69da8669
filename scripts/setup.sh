#!/usr/bin/env bash
# Create the environment this project runs and is tested in, or reuse it: scripts/setup.sh [--stack VERSION]
# The stacks are those of scripts/requirements. The oldest, the default, goes to .venv, another to .venv-VERSION beside it.
# Needs Python 3.11 or 3.12 and a package index, nothing else. For a machine without GPUs: on GPUs use container/Dockerfile.
set -euo pipefail
cd "$(dirname "$0")/.."

lists=scripts/requirements
mapfile -t stacks < <(ls $lists | sed -n 's/^stack-\([0-9.]*\)\.txt$/\1/p' | sort --version-sort)
stack=${stacks[0]}
while (($#)); do
    case $1 in
        --stack) stack=${2:?--stack needs a version, one of ${stacks[*]}}; shift 2 ;;
        *) echo "setup.sh: unknown option $1 (known: --stack VERSION, one of ${stacks[*]})" >&2; exit 2 ;;
    esac
done
if [[ ! -f $lists/stack-$stack.txt ]]; then
    echo "setup.sh: no stack $stack; there are: ${stacks[*]}" >&2
    exit 2
fi
venv=.venv
[[ $stack == "${stacks[0]}" ]] || venv=.venv-$stack

# The environment is complete when the stamp holds the hash of what it was made from.
wanted=$(cat $lists/stack-$stack*.txt pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [[ -f $venv/complete && $(<$venv/complete) == "$wanted" ]]; then
    exit 0
fi

python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
    3.11 | 3.12) ;;
    *) echo "setup.sh: stack $stack needs Python 3.11 or 3.12, but $python is $version; set PYTHON=python3.11" >&2; exit 2 ;;
esac
echo "setup.sh: making $venv for stack $stack with Python $version (about a minute, 2 GB)" >&2
started=$SECONDS
rm -rf "$venv"
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
# The constraints hold every package of the environment, so pip has nothing to resolve, and two of them share the work.
pinned=$lists/stack-$stack-constraints.txt
# Options of pip that a host needs stand in its list, each with its reason: "# pip: --option".
read -ra anyway < <(sed -n 's/^# pip: //p' $lists/stack-$stack-nodeps.txt | xargs)
"${pip[@]}" --no-deps "${anyway[@]}" $(grep '^torch==' $pinned) -r $lists/stack-$stack-nodeps.txt &
"${pip[@]}" --no-deps -r <(grep -v '^torch==' $pinned)
wait $!
# A CPU build of PyTorch is whole by itself. Where the index has CUDA builds alone they import only beside CUDA's libraries.
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    echo "setup.sh: the index has no CPU build of PyTorch for Python $version; installing CUDA's libraries too (several GB)" >&2
    "${pip[@]}" -r <(grep '^torch==' $pinned) -c <(grep -v '^torch==' $pinned)
fi
"${pip[@]}" --no-deps --no-build-isolation --editable .
echo "$wanted" >"$venv/complete"
echo "setup.sh: $venv is ready after $((SECONDS - started)) s" >&2
