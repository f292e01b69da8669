#!/usr/bin/env bash
# Evaluate a student beside its teacher with lm-evaluation-harness, and print what the student retains:
#   scripts/evaluate.sh --student DIR --teacher DIR [--tasks LIST] [--ruler LENGTHS] [--output DIR] [-- lm_eval options]
#   --tasks   comma-separated (default: mmlu,gsm8k,boolq,winogrande,hellaswag); "none" for RULER alone
#   --ruler   comma-separated context lengths in tokens, for example 4096,8192; without it RULER is not run
#   --output  results, one folder per model (default: runs/evaluation); a finished part is not run again
# Everything after -- goes to lm_eval: --batch_size 16, --limit 100, --num_fewshot 5, --include_path DIR, --device cpu …
# Uses the active Python where it has lm_eval (pip install -e .[eval]), else makes .venv-eval. The benchmarks' data comes from
# the Hugging Face hub, or from HF_HOME with HF_HUB_OFFLINE=1.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"

student='' teacher='' tasks=mmlu,gsm8k,boolq,winogrande,hellaswag ruler='' output=runs/evaluation
while (($#)); do
    case $1 in
        --student) student=${2:?--student needs a directory}; shift 2 ;;
        --teacher) teacher=${2:?--teacher needs a directory}; shift 2 ;;
        --tasks) tasks=${2:?--tasks needs a list}; shift 2 ;;
        --ruler) ruler=${2:?--ruler needs lengths}; shift 2 ;;
        --output) output=${2:?--output needs a directory}; shift 2 ;;
        --) shift; break ;;
        *) echo "evaluate.sh: unknown option $1 (known: --student, --teacher, --tasks, --ruler, --output, --)" >&2; exit 2 ;;
    esac
done
for model in "$student" "$teacher"; do
    if [[ ! -f $model/config.json ]]; then
        echo "evaluate.sh: '$model' is no Hugging Face model directory (no config.json); give --student and --teacher" >&2
        exit 2
    fi
done

python=${PYTHON:-python3}
if ! "$python" -c 'import lm_eval' 2>/dev/null; then
    python=$here/.venv-eval/bin/python
    list=$here/scripts/requirements/evaluation.txt
    if [[ ! -f $here/.venv-eval/complete || $(<"$here/.venv-eval/complete") != $(sha256sum <"$list") ]]; then
        echo "evaluate.sh: making .venv-eval" >&2
        rm -rf "$here/.venv-eval"
        "${PYTHON:-python3}" -m venv "$here/.venv-eval"
        "$python" -m pip install --quiet --disable-pip-version-check -r "$list"
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps --editable "$here"
        sha256sum <"$list" >"$here/.venv-eval/complete"
    fi
fi

evaluate() { # folder, model directory, tasks, lm_eval options …
    local folder=$1 model=$2 list=$3
    shift 3
    if compgen -G "$folder/*/results_*.json" >/dev/null; then
        echo "evaluate.sh: $folder is finished; remove it to run it again" >&2
        return
    fi
    "$python" -m lm_eval run --model hf --model_args "pretrained=$model" --tasks "$list" --output_path "$folder" "$@"
}

for role in teacher student; do
    model=${!role}
    if [[ $tasks != none ]]; then
        evaluate "$output/$role/tasks" "$model" "$tasks" "$@"
    fi
    if [[ -n $ruler ]]; then
        evaluate "$output/$role/ruler" "$model" ruler --metadata "{\"max_seq_lengths\": [$ruler], \"tokenizer\": \"$model\"}" "$@"
    fi
done
"$python" -m megatron_kd retained --student "$output/student" --teacher "$output/teacher"
