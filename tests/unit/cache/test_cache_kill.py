"""Writers that are killed leave what can be continued to the same bytes."""

import os
import random
import shutil
import signal
import time

import pytest
from cache_samples import directory_bytes, make_samples, write_cache

from megatron_kd.cache import CacheSpec, CacheWriter
from megatron_kd.cache.directory import CacheDirectory

SPEC = CacheSpec(vocab_size=1000, topk=8, teacher="teacher", tokenizer="tokenizer")


def write_in_a_child(path, samples, patience_s):
    """Whether a forked writer, which goes on where the one before was, came to its end in time."""
    child = os.fork()
    if not child:
        status = 1
        try:
            with CacheWriter(path, SPEC, shard_positions=60, resume=True) as writer:
                for sample in samples[writer.next_sample :]:
                    writer.append(*sample)
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return True
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path, kills):
    """SIGKILL again and again: the same bytes in the end."""
    samples, moments, path = make_samples(count=60), random.Random(0), tmp_path / "c"
    began = time.monotonic()
    whole = directory_bytes(write_cache(path, samples))
    whole_s = time.monotonic() - began
    shutil.rmtree(path)
    made = completed = 0
    while made < kills or path.exists():
        patience_s = moments.uniform(0, whole_s) if made < kills else 600
        made += not write_in_a_child(path, samples, patience_s)
        if (path / "manifest.json").exists():  # the writer may also be killed after its last act
            # Sweeps what the killed ones left.
            CacheDirectory(path).publish_manifest(samples=len(samples))
            assert directory_bytes(path) == whole
            completed += 1
            shutil.rmtree(path)
    assert completed
