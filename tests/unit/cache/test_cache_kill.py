"""Writers that are killed leave what can be continued to the same bytes."""

import os
import random
import shutil
import subprocess
import sys
import time

import pytest
from cache_samples import directory_bytes, make_samples, write_cache

from megatron_kd.cache import publish_manifest

KILLED_WRITER = """
import sys
sys.path.insert(0, {here!r})
from cache_samples import make_samples
from megatron_kd.cache import CacheWriter
samples = make_samples(count=200, tokens=(20, 60))
print("ready", flush=True)
with CacheWriter({path!r}, vocab_size=1000, topk=8, teacher="teacher", tokenizer="tokenizer",
                 shard_positions=60, resume=True) as writer:
    for sample in samples[writer.next_sample:]:
        writer.append(*sample)
"""


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    """SIGKILL again and again: the same bytes in the end."""
    path, moments, whole, completed = tmp_path / "c", random.Random(0), None, 0
    script = KILLED_WRITER.format(here=os.path.dirname(__file__), path=str(path))

    def run(patience_s):
        """Seconds the writer took, or None where it was killed."""
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        child.stdout.readline()
        began = time.monotonic()
        try:
            assert child.wait(patience_s) == 0
            return time.monotonic() - began
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return None
        finally:
            child.stdout.close()

    whole_s = run(600)
    whole = directory_bytes(path)
    shutil.rmtree(path)
    kills = 0
    while kills < 50 or path.exists():
        if run(moments.uniform(0, whole_s) if kills < 50 else 600) is None:
            kills += 1
        if (path / "manifest.json").exists():  # or killed after its last act
            publish_manifest(path, samples=200)  # also sweeps what killed writers left
            assert directory_bytes(path) == whole
            completed += 1
            shutil.rmtree(path)
    assert completed
    samples = make_samples(count=200, tokens=(20, 60))
    assert directory_bytes(write_cache(path, samples)) == whole
