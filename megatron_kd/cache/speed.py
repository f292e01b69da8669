"""How fast a cache is written and read on this machine: `python -m megatron_kd.cache.speed`.

Prints one line per codec: bytes per position, and positions per second of one core's time (and of
the clock's, which is less when others use the machine).
"""

import argparse
import tempfile
import time

import numpy as np

from megatron_kd.cache.codecs import CODECS
from megatron_kd.cache.format import CacheSpec
from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.writer import CacheWriter

TOKENS, SAMPLES = 4097, 4


def made_up_sample(rng: np.random.Generator, vocab_size: int, topk: int):
    """Ids evenly over the vocabulary, probabilities that fall as a power of the rank."""
    step = vocab_size // topk
    ids = np.arange(topk) * step + rng.integers(0, step, (TOKENS, topk))
    logprobs = -1.4 * np.log(np.arange(1, topk + 1)) + rng.normal(0, 0.3, (TOKENS, topk))
    logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True)) - np.log(0.92)
    logprobs = rng.permuted(logprobs, axis=1).astype(np.float32)
    mask = np.arange(TOKENS) < TOKENS - 1
    return rng.integers(0, vocab_size, TOKENS), mask, ids, logprobs


def measure(codec: str, vocab_size: int, topk: int, repeats: int) -> dict[str, float]:
    """Bytes per position, and the best of `repeats` rates in positions per second."""
    rng = np.random.default_rng(0)
    samples = [made_up_sample(rng, vocab_size, topk) for _ in range(SAMPLES)]
    positions = SAMPLES * (TOKENS - 1)
    with tempfile.TemporaryDirectory() as folder:
        spec = CacheSpec(
            vocab_size=vocab_size, topk=topk, teacher="none", tokenizer="none", codec=codec
        )
        began = time.process_time()
        with CacheWriter(f"{folder}/cache", spec) as writer:
            for sample in samples:
                writer.append(*sample)
        written = positions / (time.process_time() - began)
        reader = CacheReader(f"{folder}/cache")
        core, clock = [], []
        for _ in range(repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            for index in range(SAMPLES):
                reader[index]
            core.append(positions / (time.process_time() - cpu))
            clock.append(positions / (time.perf_counter() - wall))
        size = sum(entry.bytes for entry in reader.shards)
        reader.close()
    return {
        "bytes_per_position": size / positions,
        "written_per_core_s": written,
        "read_per_core_s": max(core),
        "read_per_clock_s": max(clock),
        "read_per_core_s_median": float(np.median(core)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--topk", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    for codec in CODECS:
        found = measure(codec, args.vocab_size, args.topk, args.repeats)
        print(
            f"{codec:8} {found['bytes_per_position']:6.1f} bytes/position; "
            f"positions/s/core: read {found['read_per_core_s']:,.0f} "
            f"(median {found['read_per_core_s_median']:,.0f}, "
            f"by the clock {found['read_per_clock_s']:,.0f}), "
            f"write {found['written_per_core_s']:,.0f}"
        )


if __name__ == "__main__":
    main()
