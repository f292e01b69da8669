"""Run a teacher once over prepared data and keep its top-K per supervised token.

Any number of processes can share the work: --worker i/n, the ranks of torchrun, or a SLURM job
array. A run that was stopped, or killed, goes on where it was when the same command is given again.
"""

import argparse
import os
import sys
from pathlib import Path

from megatron_kd.cache.format import CODECS, HIDDEN_DTYPES
from megatron_kd.cache.writer import DEFAULT_SHARD_POSITIONS
from megatron_kd.teacher.capture.job import CaptureJob, capture, resume
from megatron_kd.teacher.capture.plan import find_splits
from megatron_kd.teacher.capture.workers import Stopped, Worker, stoppable
from megatron_kd.teacher.engines.base import ENGINES, SAMPLINGS, EngineError, engine_class

__all__ = ["add_arguments", "resume", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="folder that megatron-kd prepare made")
    parser.add_argument(
        "--teacher",
        required=True,
        help="Hugging Face model directory; with a server, its model name",
    )
    parser.add_argument(
        "--output", required=True, help="folder for the cache, one sub-folder per split"
    )
    parser.add_argument("--engine", default="transformers", choices=sorted(ENGINES))
    parser.add_argument("--worker", help="i/n: make every n-th shard, beginning with the i-th")
    parser.add_argument("--split", action="append", help="only this split (may be repeated)")

    kept = parser.add_argument_group("what is kept of each distribution")
    kept.add_argument("--topk", type=int, default=100)
    kept.add_argument(
        "--top-p", type=float, default=1.0, help="cut the K where their mass reaches this"
    )
    kept.add_argument(
        "--sampling",
        default="topk",
        choices=SAMPLINGS,
        help="random: K draws instead of the K largest",
    )
    kept.add_argument("--seed", type=int, default=1234, help="of random draws")
    kept.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=(),
        help="keep exact normalisers at these too",
    )
    kept.add_argument(
        "--hidden-dtype", choices=HIDDEN_DTYPES, help="keep last hidden states, in this dtype"
    )
    kept.add_argument(
        "--vocab-size", type=int, help="ids from here on are padding; default: the tokenizer's"
    )

    stored = parser.add_argument_group("how it is stored")
    stored.add_argument("--codec", default="compact", choices=CODECS)
    stored.add_argument("--shard-positions", type=int, default=DEFAULT_SHARD_POSITIONS)
    stored.add_argument("--licence", help="the teacher's; default: what its model card says")

    engine = parser.add_argument_group("engine options (each engine takes those it knows)")
    for name, kind, text in (
        ("dtype", str, "auto, float32, bfloat16 or float16"),
        ("batch-tokens", int, "tokens of one forward pass, padding included"),
        ("device-map", str, "transformers: auto, or a JSON object"),
        ("attention", str, "transformers: attention implementation"),
        ("tensor-parallel", int, "vllm, megatron: GPUs that share each layer"),
        ("pipeline-parallel", int, "megatron: ranks that share the layers out"),
        ("max-model-len", int, "vllm: longest prompt"),
        ("gpu-memory-utilization", float, "vllm: share of the GPU"),
        ("concurrency", int, "servers: requests under way at once"),
        ("timeout-s", float, "servers: seconds for one request"),
        ("retries", int, "servers: further tries of a request"),
    ):
        engine.add_argument(f"--{name}", type=kind, help=text)
    engine.add_argument("--server", action="append", help="servers: address (may be repeated)")
    engine.add_argument("--trust-remote-code", action="store_true", default=None)


# Options that an engine may or may not know.
_ENGINE_OPTIONS = (
    "dtype",
    "batch_tokens",
    "device_map",
    "attention",
    "tensor_parallel",
    "pipeline_parallel",
    "max_model_len",
    "gpu_memory_utilization",
    "concurrency",
    "timeout_s",
    "retries",
    "server",
    "trust_remote_code",
)


def run(args: argparse.Namespace) -> int:
    splits = find_splits(args.data)
    if args.split:
        unknown = sorted(set(args.split) - set(splits))
        if unknown:
            raise EngineError(
                f"{args.data} has no split {', '.join(unknown)}, but {', '.join(splits)}"
            )
        splits = {name: splits[name] for name in splits if name in args.split}
    given = {name: getattr(args, name) for name in _ENGINE_OPTIONS}
    common = dict(
        engine=args.engine,
        options={name: value for name, value in given.items() if value is not None},
        topk=args.topk,
        top_p=args.top_p,
        sampling=args.sampling,
        seed=args.seed,
        temperatures=tuple(args.temperatures),
        hidden_dtype=args.hidden_dtype,
        codec=args.codec,
        shard_positions=args.shard_positions,
        vocab_size=args.vocab_size,
        licence=args.licence,
    )
    local = Path(args.teacher).exists()
    teacher = os.path.abspath(args.teacher) if local else args.teacher
    jobs = {
        name: (
            CaptureJob(data=os.path.abspath(path), teacher=teacher, **common),
            Path(args.output, name),
        )
        for name, path in splits.items()
    }
    engine = engine_class(args.engine)
    spans_ranks = getattr(engine, "spans_ranks", False)
    if args.worker:
        worker = Worker.parse(args.worker, os.environ, ranks=not spans_ranks)
    else:
        worker = Worker.from_environment(os.environ, ranks=not spans_ranks)
    try:
        with stoppable():
            if spans_ranks:
                options = next(iter(jobs.values()))[0].engine_options()
                with engine.session(options) as leads:
                    if not leads:
                        return 0
                    complete = capture(jobs, worker)
            else:
                complete = capture(jobs, worker)
    except Stopped as stop:
        print(
            f"megatron-kd capture: stopped by {stop}; finished shards are kept. Run the same "
            "command again to go on",
            file=sys.stderr,
        )
        return stop.status
    for name, done in complete.items():
        state = "complete" if done else "waits for the shards of other workers"
        print(f"{Path(args.output, name)}: {state}")
    return 0
