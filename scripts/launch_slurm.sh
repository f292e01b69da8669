#!/usr/bin/env bash
# Write an sbatch script and submit it. The recipe is the one that torchrun takes on a laptop.
#   scripts/launch_slurm.sh [options] RECIPE [key=value …]             train: one torchrun per node
#   scripts/launch_slurm.sh [options] --capture N -- ARGUMENTS         capture: N array tasks share the shards
# Options:
#   --cluster NAME     configs/cluster/NAME.env, or a path: environment, and what a node has (default: infiniband)
#   --nodes N          nodes of a training run (default: the recipe's launch.nodes)
#   --time LIMIT       of each attempt, as for sbatch; the run goes on in the next one (default 04:00:00)
#   --save-ahead S     seconds before the limit at which to save and requeue (default 300)
#   --requeues N       how often to start again after a node was lost or a process killed (default 3)
#   --container IMAGE  run inside it, through Pyxis; with --mounts A:B,C:D
#   --job-name NAME    default: the recipe's name
#   --logs DIR         default: OUTPUT_DIR/slurm
#   --sbatch OPTION    passed on to sbatch (may be repeated): --sbatch --partition=batch
#   --dry-run          print the sbatch script and submit nothing
# A training run starts launch.ranks_per_node ranks on each node (override: launch.ranks_per_node=N; where the recipe
# does not say, the cluster's), and asks for as many GPUs. More than the cluster's nodes have is refused.
# Docs: docs/slurm.md
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD

fail() { echo "launch_slurm.sh: $1" >&2; exit 2; }

cluster=infiniband nodes='' limit=04:00:00 save_ahead_s=300 requeues=3
container='' mounts='' job_name='' logs='' tasks='' sharded='' dry_run=false
extra=() rest=()
while (($#)); do
    case $1 in
        --cluster | --nodes | --time | --save-ahead | --requeues | --container | --mounts | --job-name | --logs | --sbatch | --capture)
            (($# > 1)) || fail "$1 needs a value" ;;&
        --cluster) cluster=$2; shift 2 ;;
        --nodes) nodes=$2; shift 2 ;;
        --time) limit=$2; shift 2 ;;
        --save-ahead) save_ahead_s=$2; shift 2 ;;
        --requeues) requeues=$2; shift 2 ;;
        --container) container=$2; shift 2 ;;
        --mounts) mounts=$2; shift 2 ;;
        --job-name) job_name=$2; shift 2 ;;
        --logs) logs=$2; shift 2 ;;
        --sbatch) extra+=("$2"); shift 2 ;;
        --capture) tasks=$2; shift 2 ;;
        --dry-run) dry_run=true; shift ;;
        --) shift; rest+=("$@"); break ;;
        -h | --help) sed -n '2,/^# Docs/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --*) fail "unknown option $1; see --help" ;;
        *) rest+=("$1"); shift ;;
    esac
done
for number in "nodes ${nodes:-1}" "save-ahead $save_ahead_s" "requeues $requeues" "capture ${tasks:-1}"; do
    [[ ${number#* } =~ ^[0-9]+$ ]] || fail "--${number% *} must be a whole number, not ${number#* }"
done
((${nodes:-1} > 0)) || fail "--nodes must be 1 or more"
[[ -z $mounts || -n $container ]] || fail "--mounts needs --container"

environment=$cluster
[[ -f $environment ]] || environment=configs/cluster/$cluster.env
[[ -f $environment ]] || fail "no cluster $cluster; there are: $(cd configs/cluster && ls ./*.env | sed 's/^..//; s/\.env$//' | xargs), or give a file"
gpus_per_node=8 ranks_per_node='' sbatch_options=()
# shellcheck disable=SC1090
source "$environment"
ranks_per_node=${ranks_per_node:-$gpus_per_node}
((ranks_per_node > 0)) || fail "$environment sets neither gpus_per_node nor ranks_per_node"

# The environment of this checkout where there is one; a container brings its own.
path=''
[[ -n $container || ! -d .venv/bin ]] || path=$repository/.venv/bin
[[ -z $path ]] || PATH=$path:$PATH

if [[ -n $tasks ]]; then
    ((${#rest[@]})) || fail "--capture N needs the arguments of megatron-kd capture after --"
    [[ " ${rest[*]} " != *" --worker "* ]] || fail "--worker is set from the array task; leave it out"
    output=''
    for ((i = 0; i + 1 < ${#rest[@]}; i++)); do
        [[ ${rest[i]} != --output ]] || output=${rest[i + 1]}
    done
    [[ -n $output ]] || fail "megatron-kd capture needs --output"
    ((${nodes:=1} == 1)) || fail "each capture task runs on one node; give more tasks instead of --nodes"
    name=${job_name:-capture}
    logs=${logs:-$output.slurm}
    work="megatron-kd capture ${rest[*]@Q} --worker \$SLURM_ARRAY_TASK_ID/$tasks"
    array="#SBATCH --array=0-$((tasks - 1))"
    job='${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}'
    forwarded=TERM # capture keeps its finished shards
else
    ((${#rest[@]})) || fail "which recipe? See --help"
    recipe=${rest[0]}
    overrides=("${rest[@]:1}")
    # The recipe is read here: what is wrong with it shows now, not when the job starts.
    answer=$(PYTHONPATH=$repository python3 -c '
import sys
from megatron_kd.config import ConfigError, from_recipe
try:
    config = from_recipe(sys.argv[1], sys.argv[2:])
    sharded = any((config.bridge.get(x) or {}).get("use_megatron_fsdp") for x in ("ddp", "dist"))
    launch = config.launch
    print(launch.nodes, launch.ranks_per_node or "", config.output_dir, sharded or "", sep="\n")
except ConfigError as error:
    sys.exit(f"launch_slurm.sh: {error}")
' "$recipe" "${overrides[@]}") || exit 2
    mapfile -t from_recipe <<<"$answer"
    nodes=${nodes:-${from_recipe[0]}} output=${from_recipe[2]} sharded=${from_recipe[3]:-} most=$ranks_per_node
    ((gpus_per_node == 0 || gpus_per_node > most)) || most=$gpus_per_node
    ranks_per_node=${from_recipe[1]:-$ranks_per_node}
    ((ranks_per_node <= most)) || fail "the run wants $ranks_per_node ranks on each node and $environment has room for $most; choose another --cluster, or give launch.ranks_per_node=$most"
    ((gpus_per_node == 0)) || gpus_per_node=$ranks_per_node
    name=${job_name:-$(basename "$recipe" .yaml)}
    logs=${logs:-$output/slurm}
    work="python3 -m torch.distributed.run --nnodes=$nodes --nproc-per-node=$ranks_per_node \\
    --rdzv-backend=c10d --rdzv-endpoint=\$address:\$port --rdzv-id=\$SLURM_JOB_ID-\$attempt \\
    --rdzv-conf=is_host=\$((SLURM_NODEID == 0)),join_timeout=600 --max-restarts=0 \\
    \${survive[@]} -m megatron_kd distill ${recipe@Q} ${overrides[*]@Q}"
    array=''
    job='$SLURM_JOB_ID'
    forwarded=USR1
fi
logs=$(realpath -m "$logs")

options=("${sbatch_options[@]}")
((gpus_per_node == 0)) || options+=("--gpus-per-node=$gpus_per_node")
options+=("${extra[@]}")
inside=()
[[ -z $container ]] || inside=(--container-image="$container" --container-workdir="$repository"
    --container-mounts="$repository:$repository,$logs:$logs${mounts:+,$mounts}")

script=$(mktemp)
trap 'rm -f "$script"' EXIT
{
    cat <<SCRIPT
#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
#SBATCH --time=$limit
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@$save_ahead_s
#SBATCH --output=$logs/$( [[ -n $array ]] && echo %A_%a || echo %j ).batch.log
SCRIPT
    [[ -z $array ]] || echo "$array"
    for option in "${options[@]}"; do echo "#SBATCH $option"; done
    cat <<SCRIPT
# Written by scripts/launch_slurm.sh: ${rest[*]@Q}
set -uo pipefail
cd ${repository@Q}
${path:+export PATH=${path@Q}:\$PATH}${container:+export PYTHONPATH=${repository@Q}}

# $environment
$(grep -v '^ *#' "$environment")
SCRIPT
    [[ -z $sharded ]] || echo 'unset CUDA_DEVICE_MAX_CONNECTIONS # Megatron-FSDP gathers weights beside the computation'
    cat <<SCRIPT

export job=$job
export attempt=\${SLURM_RESTART_COUNT:-0}
first=\$(scontrol show hostnames "\$SLURM_JOB_NODELIST" | head -n 1)
export address=\$(scontrol show node "\$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
export port=\$((20000 + (SLURM_JOB_ID * 7 + attempt) % 10000)) # below the ephemeral ports
echo "\$(date -Is) \$job attempt \$attempt on \$SLURM_JOB_NODELIST, rendezvous at \$address:\$port"

# Ahead of the time limit SLURM signals this script, which asks the processes of the run to save and stop.
stopped=false cancelled=false
trap 'stopped=true; scancel --signal=$forwarded "\$SLURM_JOB_ID"' USR1
trap 'cancelled=true' TERM # scancel or preemption: SLURM itself tells the run, and decides what becomes of the job

# Without --cpu-bind=none a site's default would put every rank of a node on one core.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none --output=$logs/\$job.\$attempt.node%n.log ${inside[*]@Q} \\
    bash -c "\$(cat <<'NODE'
SCRIPT
    if [[ -n $array ]]; then
        echo 'trap : TERM # capture acts on it; this shell waits to record the status'
    else
        cat <<'SCRIPT'
# The ranks act on these signals; the launcher must outlive them, or they could not finish saving.
trap "" USR1 TERM
survive=()
python3 -m torch.distributed.run --help | grep -q -- --signals-to-handle && survive=(--signals-to-handle=SIGINT,SIGHUP)
SCRIPT
    fi
    cat <<SCRIPT
$work
status=\$?
echo \$status >$logs/\$job.\$attempt.\$SLURM_NODEID.status
exit \$status
NODE
)" &
launcher=\$!
while :; do
    wait "\$launcher"
    status=\$?
    ((status > 128)) && kill -0 "\$launcher" 2>/dev/null || break # a trap ran; the launcher is still there
done
echo "\$(date -Is) \$job attempt \$attempt: status \$status"

# Whether something was taken from the run: a launcher ended by a signal, all of them killed before they could say how
# they ended, or a node that does not answer. srun's own status cannot tell: it kills the other nodes when one fails.
was_hit() {
    local file recorded=false
    for file in $logs/\$job.\$attempt.*.status; do
        [[ -f \$file ]] || continue
        recorded=true
        ((\$(<"\$file") > 128)) && return 0
    done
    \$recorded || return 0
    ! timeout 120 srun --overlap --ntasks-per-node=1 true
}

if \$stopped; then
    echo "stopped ahead of the time limit; requeued"
    scontrol requeue "\$SLURM_JOB_ID"
elif ! \$cancelled && ((status != 0 && attempt < $requeues)) && was_hit; then
    echo "a process was killed or a node was lost; requeued"
    scontrol requeue "\$SLURM_JOB_ID"
else
    exit \$status # 0, or an error of the run itself, which another attempt would meet again
fi
SCRIPT
} >"$script"
bash -n "$script"

if $dry_run; then
    cat "$script"
    exit 0
fi
command -v sbatch >/dev/null || fail "sbatch is not on the PATH; run this on a login node, or use --dry-run"
mkdir -p "$logs"
kept=$logs/$name.sbatch
cp "$script" "$kept"
submitted=$(sbatch --parsable "$kept")
echo "submitted $submitted: $kept, logs in $logs"
