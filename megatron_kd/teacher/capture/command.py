"""Run a teacher once over prepared data and keep its top-K per supervised token.

Any number of processes can share the work: --worker i/n, the ranks of torchrun, or a SLURM job
array. A run that was stopped, or killed, goes on where it was when the same command is given again.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from megatron_kd.cache.codecs import CODECS
from megatron_kd.cache.format import HIDDEN_DTYPES, SAMPLINGS
from megatron_kd.teacher.capture.engine_arguments import (
    add_engine_arguments,
    given_engine_options,
)
from megatron_kd.teacher.capture.job import CaptureJob
from megatron_kd.teacher.capture.sample_documents import find_splits
from megatron_kd.teacher.capture.shards import capture
from megatron_kd.teacher.capture.signals import Stopped, stoppable
from megatron_kd.teacher.capture.workers import Worker
from megatron_kd.teacher.engines import engine_class, explained_absence
from megatron_kd.teacher.engines.base import EngineError


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
    parser.add_argument("--worker", help="i/n: make every n-th shard, beginning with the i-th")
    parser.add_argument("--split", action="append", help="only this split (may be repeated)")

    kept = parser.add_argument_group("what is kept of each distribution")
    kept.add_argument("--topk", type=int, default=CaptureJob.topk)
    kept.add_argument(
        "--top-p",
        type=float,
        default=CaptureJob.top_p,
        help="cut the K where their mass reaches this",
    )
    kept.add_argument(
        "--sampling",
        default=CaptureJob.sampling,
        choices=SAMPLINGS,
        help="random: K draws instead of the K largest",
    )
    kept.add_argument("--seed", type=int, default=CaptureJob.seed, help="seed of the random draws")
    kept.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=CaptureJob.temperatures,
        help="keep exact normalizers at these too",
    )
    kept.add_argument(
        "--label-logprob",
        action="store_true",
        help="keep the log-probability of each next token, candidate or not (format version 2)",
    )
    kept.add_argument(
        "--hidden-dtype", choices=HIDDEN_DTYPES, help="keep last hidden states, in this dtype"
    )
    kept.add_argument(
        "--vocab-size", type=int, help="ids from here on are padding; default: the tokenizer's"
    )

    stored = parser.add_argument_group("how it is stored")
    stored.add_argument("--codec", default=CaptureJob.codec, choices=CODECS)
    stored.add_argument("--shard-positions", type=int, default=CaptureJob.shard_positions)
    stored.add_argument(
        "--license",
        dest="licence",
        metavar="LICENSE",
        help="the teacher's; default: what its model card says",
    )
    stored.add_argument("--licence", help=argparse.SUPPRESS)  # the spelling of earlier releases

    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    splits = find_splits(args.data)
    if args.split:
        unknown = sorted(set(args.split) - set(splits))
        if unknown:
            raise EngineError(
                f"{args.data} has no split {', '.join(unknown)}, but {', '.join(splits)}"
            )
        splits = {name: splits[name] for name in splits if name in args.split}
    common = dict(
        engine=args.engine,
        options=given_engine_options(args),
        topk=args.topk,
        top_p=args.top_p,
        sampling=args.sampling,
        seed=args.seed,
        temperatures=tuple(args.temperatures),
        label_logprob=args.label_logprob,
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
    if args.worker:
        worker = Worker.parse(args.worker, os.environ, ranks=not engine.spans_ranks)
    else:
        worker = Worker.from_environment(os.environ, ranks=not engine.spans_ranks)
    options = next(iter(jobs.values()))[0].engine_options()
    try:
        with stoppable(), contextlib.ExitStack() as entered:
            with explained_absence(args.engine):
                leads = entered.enter_context(engine.session(options))
            if not leads:
                return 0
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
