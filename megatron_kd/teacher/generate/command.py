"""Let a model answer prompts; the responses are what megatron-kd prepare reads.

Prompts are text, or conversations: of one that ends with the assistant, all turns before its last.
Any number of processes can share the work: --worker i/n, the ranks of torchrun, or a SLURM job
array. A run that was stopped, or killed, goes on where it was when the same command is given again.
"""

import argparse
import os
import sys
from pathlib import Path

from megatron_kd.cache.codecs import CODECS
from megatron_kd.data.prepare.chat import ChatRules
from megatron_kd.data.prepare.command import add_template_arguments
from megatron_kd.data.prepare.records import FIELDS
from megatron_kd.teacher.capture.engine_arguments import add_engine_arguments, given_engine_options
from megatron_kd.teacher.capture.signals import Stopped, stoppable
from megatron_kd.teacher.capture.workers import Worker
from megatron_kd.teacher.generate.answers import CACHE_FOLDER, RESPONSES_NAME, AnswerDirectory
from megatron_kd.teacher.generate.job import GenerateJob, KeptRows, resolve
from megatron_kd.teacher.generate.shards import generate
from megatron_kd.teacher.generators import GENERATORS
from megatron_kd.teacher.generators.base import Sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--prompts",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="as prepare's --input: .jsonl, .jsonl.gz or .parquet files with text or messages, "
        "folders of these, or datasets saved to disk",
    )
    add(
        "--model",
        required=True,
        help="Hugging Face model directory; with a server, its model name",
    )
    add("--tokenizer", metavar="DIR", help="the model's, where --model is a name at a server")
    add("--output", required=True, metavar="DIR", help=f"gets {RESPONSES_NAME} and a manifest")
    add("--worker", help="i/n: make every n-th shard, beginning with the i-th")
    add("--field", choices=FIELDS[:2], help="which one to read where records have several")
    add("--hf-split", metavar="NAME", help="split of a saved DatasetDict")
    add("--bos", default="auto", metavar="auto|none|TOKEN", help="before each text")
    add_template_arguments(parser)
    add("--max-prompts", type=int, help="stop after this many")
    add("--skip-invalid", action="store_true", help="leave out what cannot be used, do not stop")
    add(
        "--shard-prompts",
        type=int,
        default=GenerateJob.shard_prompts,
        help="prompts whose responses appear on disk together; "
        f"default {GenerateJob.shard_prompts}",
    )

    drawn = parser.add_argument_group("how responses are drawn")
    add = drawn.add_argument
    add("--samples", type=int, default=Sampling.samples, help="responses per prompt; default 1")
    add(
        "--max-new-tokens",
        type=int,
        default=Sampling.max_new_tokens,
        help=f"a longer response is cut, and marked; default {Sampling.max_new_tokens}",
    )
    add(
        "--temperature",
        type=float,
        default=Sampling.temperature,
        help="divides the logits; 0: the most likely token; default 1",
    )
    add("--top-p", type=float, default=Sampling.top_p, help="draw from this much probability")
    add("--top-k", type=int, default=Sampling.top_k, help="draw from so many tokens; 0: all")
    add("--seed", type=int, default=Sampling.seed)

    kept = parser.add_argument_group("the distributions the responses are drawn from")
    add = kept.add_argument
    add(
        "--capture",
        action="store_true",
        help=f"keep them: a cache in {CACHE_FOLDER}/, without a second pass",
    )
    add("--topk", type=int, default=KeptRows.topk, help="candidates per row")
    add("--topk-mass", type=float, default=KeptRows.top_p, help="cut them at this mass")
    add("--temperatures", type=float, nargs="+", default=KeptRows.temperatures)
    add("--label-logprob", action="store_true", help="keep that of each token of the responses")
    add("--codec", default=KeptRows.codec, choices=CODECS)
    add("--license", dest="licence", metavar="LICENSE", help="default: the model card's")
    add(
        "--validation-fraction",
        type=float,
        default=KeptRows.validation_fraction,
        help="of the prompts, held out of that cache's training samples; default 0.05",
    )
    add("--split-seed", type=int, default=KeptRows.split_seed)

    add_engine_arguments(parser, GENERATORS)


def run(args: argparse.Namespace) -> int:
    local = Path(args.model).exists()
    rows = None
    if args.capture:
        rows = KeptRows(
            topk=args.topk,
            top_p=args.topk_mass,
            temperatures=tuple(args.temperatures),
            label_logprob=args.label_logprob,
            codec=args.codec,
            licence=args.licence,
            validation_fraction=args.validation_fraction,
            split_seed=args.split_seed,
        )
    job = GenerateJob(
        prompts=tuple(args.prompts),
        model=os.path.abspath(args.model) if local else args.model,
        tokenizer=args.tokenizer,
        engine=args.engine,
        options=given_engine_options(args),
        sampling=Sampling(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            seed=args.seed,
            samples=args.samples,
        ),
        chat=ChatRules("last", args.template_kwargs, args.template_date),
        bos=None if args.bos == "none" else args.bos,
        record_field=args.field,
        hf_split=args.hf_split,
        max_prompts=args.max_prompts,
        skip_invalid=args.skip_invalid,
        shard_prompts=args.shard_prompts,
        rows=rows,
    )
    if args.worker:
        worker = Worker.parse(args.worker, os.environ)
    else:
        worker = Worker.from_environment(os.environ)
    try:
        with stoppable():
            resolved = resolve(job, lambda line: print(line, file=sys.stderr))
            done = generate(resolved, args.output, worker)
    except Stopped as stop:
        print(
            f"megatron-kd generate: stopped by {stop}; finished shards are kept. Run the same "
            "command again to go on",
            file=sys.stderr,
        )
        return stop.status
    if not done:
        print(f"{args.output}: waits for the shards of other workers")
        return 0
    counts = AnswerDirectory(args.output).manifest()
    line = (
        f"{Path(args.output, RESPONSES_NAME)}: {counts['responses']} responses of "
        f"{counts['response_tokens']} tokens to {counts['prompts']['count']} prompts"
    )
    if counts["truncated"]:
        line += f"; {counts['truncated']} cut short, marked truncated (see --max-new-tokens)"
    if counts["empty"]:
        line += f"; {counts['empty']} empty"
    print(line)
    return 0
