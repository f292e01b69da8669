"""Whether a cache and prepared data hold the same samples."""

from types import SimpleNamespace

import pytest

from megatron_kd.data.sources import check_same_tokens


class Samples(list):
    """What both readers have of use here."""

    def __init__(self, tokens, **manifest):
        super().__init__(SimpleNamespace(tokens=row) for row in tokens)
        self.manifest, self.fingerprint = manifest, manifest.get("fingerprint")


TOKENS = [[1, 2, 3], [4, 5], [6, 7, 8]]


def test_a_cache_and_data_of_the_same_tokens_go_together():
    check_same_tokens(Samples(TOKENS), Samples(TOKENS, fingerprint="a"))


@pytest.mark.parametrize("index", range(3))
def test_a_sample_with_other_tokens_is_named(index):
    other = [row if i != index else [9, *row[1:]] for i, row in enumerate(TOKENS)]
    with pytest.raises(ValueError, match=f"sample {index} of the cache holds other tokens"):
        check_same_tokens(Samples(TOKENS), Samples(other, fingerprint="a"))


def test_another_number_of_samples_is_refused():
    with pytest.raises(ValueError, match="holds 3 samples, the prepared data 2"):
        check_same_tokens(Samples(TOKENS), Samples(TOKENS[:2], fingerprint="a"))


def test_a_cache_that_names_the_data_it_was_captured_from_is_not_read():
    captured = Samples([], data={"fingerprint": "a"})
    check_same_tokens(captured, Samples(TOKENS, fingerprint="a"))
    with pytest.raises(ValueError, match="captured from other data"):
        check_same_tokens(captured, Samples(TOKENS, fingerprint="b"))
