"""Writes an engine's rows of given documents to a file; runs in whatever environment that engine
lives in.

Usage: dump_rows.py ENGINE TEACHER TOPK VOCAB_SIZE DOCUMENTS.npz OUTPUT.npz OPTIONS_JSON
"""

import json
import sys

import numpy as np

from megatron_kd.teacher.engines import engine_class
from megatron_kd.teacher.engines.base import RowRequest, TeacherDocument


def load_documents(path):
    with np.load(path) as stored:
        count = len(stored.files) // 2
        return [TeacherDocument(stored[f"tokens{i}"], stored[f"rows{i}"]) for i in range(count)]


def main(name, teacher, topk, vocab_size, documents, output, options):
    kind = engine_class(name)
    options = kind.Options(**json.loads(options))
    described = kind.describe(teacher, options)
    engine = kind(teacher, RowRequest(topk=int(topk), vocab_size=int(vocab_size)), options)
    rows = dict(engine.stream(load_documents(documents)))
    engine.close()
    arrays = {
        "version": np.array(described.version),
        "tokenizer": np.array(str(described.tokenizer)),
    }
    for index, found in rows.items():
        arrays[f"ids{index}"] = found.topk_ids
        arrays[f"logprobs{index}"] = found.topk_logprobs
    np.savez(output, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
