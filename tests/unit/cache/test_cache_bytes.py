"""Format v1 byte for byte: what is written today is what earlier releases wrote and can read.

The digests were made by the release before codecs became units (2ef1a17), from these same samples.
"""

import hashlib

import numpy as np
import pytest
from cache_samples import make_sample

from megatron_kd.cache import CacheSpec, CacheWriter
from megatron_kd.cache.verify import verify_cache

KINDS = {
    # Ids of two and of three bytes; full, ragged and empty rows; every optional tensor.
    "narrow": dict(vocab_size=1000, topk=8),
    "wide": dict(vocab_size=128256, topk=16),
    "ragged": dict(vocab_size=70000, topk=7, temperatures=(2.0, 0.5)),
    "hidden": dict(vocab_size=300, topk=5, hidden_size=3, hidden_dtype="bfloat16"),
}
# The first 16 digits of the manifest's SHA-256; through its checksums it binds every shard's bytes.
DIGESTS = {
    ("narrow", "compact"): "32687270a5f13fb8",
    ("narrow", "fp16"): "997f86ece03e919f",
    ("wide", "compact"): "f1d11f53820a104a",
    ("wide", "fp16"): "03f9b36335901dd0",
    ("ragged", "compact"): "673764bd39d8771c",
    ("ragged", "fp16"): "52249eab41215003",
    ("hidden", "compact"): "5f6cc8d1ecf98016",
    ("hidden", "fp16"): "6b41229ab1301c87",
}


def write(path, codec, vocab_size, topk, **description):
    """A cache of two shards whose samples depend on the arguments alone."""
    rng = np.random.default_rng((vocab_size, topk))
    spec = CacheSpec(
        vocab_size=vocab_size,
        topk=topk,
        codec=codec,
        teacher={"name": "café"},
        tokenizer="tokenizer",
        **description,
    )
    with CacheWriter(path, spec, shard_positions=80) as writer:
        for number in range(6):
            tokens, mask, ids, logprobs = make_sample(rng, 31, vocab_size, topk)
            further = {}
            if "temperatures" in description:
                unused = rng.random(ids.shape) < 0.3
                unused[:, 0] = False
                ids[unused], logprobs[unused] = -1, -np.inf
                mask = mask & (number != 2)
                further["log_z"] = {tau: rng.normal(size=31) for tau in (0.5, 2.0)}
            if "hidden_size" in description:
                further["hidden"] = rng.normal(size=(31, 3)).astype(np.float32)
            writer.append(tokens, mask, ids, logprobs, cu_seqlens=[0, 9, 31], **further)


@pytest.mark.parametrize("codec", ["compact", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_those_of_the_format(tmp_path, kind, codec):
    write(tmp_path / "c", codec, **KINDS[kind])
    digest = hashlib.sha256((tmp_path / "c" / "manifest.json").read_bytes()).hexdigest()
    assert digest[:16] == DIGESTS[kind, codec]
    assert verify_cache(tmp_path / "c", decode=True) == []
