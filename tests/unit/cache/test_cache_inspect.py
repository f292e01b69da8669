"""What `megatron-kd inspect` prints and draws, and the numbers behind it."""

import matplotlib.image
import numpy as np
import pytest
from cache_samples import make_samples, write_cache

from megatron_kd import cli
from megatron_kd.cache import CacheReader
from megatron_kd.cache.figure import figure_of
from megatron_kd.cache.statistics import cache_statistics

COUNT = 24


def test_inspect_sends_no_escapes_to_the_terminal(tmp_path, capsys):
    path = write_cache(tmp_path / "c", make_samples(count=3), licence="MIT\x1b]0;owned\x07")
    assert cli.main(["inspect", str(path), "--samples", "0"]) == 0
    out = capsys.readouterr().out
    assert "\x1b]0" not in out and "\\u001b" in out


def test_inspect(tmp_path, capsys):
    rng = np.random.default_rng(0)
    samples = make_samples(count=COUNT, vocab_size=300, topk=8)
    for tokens, _, ids, _ in samples[::2]:
        tokens[1:] = ids[:-1, 0]  # some next tokens among the candidates
    for split in ("train", "validation"):
        write_cache(
            tmp_path / "c" / split,
            samples,
            vocab_size=300,
            teacher={"name": "a teacher"},
            licence="apache-2.0",
            codec=rng.choice(["compact", "fp16"]),
        )
    png = tmp_path / "figure.png"
    assert cli.main(["inspect", str(tmp_path / "c"), "--png", str(png), "--samples", "2"]) == 0
    out = capsys.readouterr().out
    for text in ("a teacher", "apache-2.0", "mass kept", "entropy", "bytes/position", "Sample 23"):
        assert text in out, text
    reader = CacheReader(tmp_path / "c" / "train")
    assert reader.fingerprint[:20] in out
    first = reader.rows(0)
    position, row = first.positions[3], 3
    assert f"│ {position} " in out
    assert f"{first.topk_ids[row, 0]} {np.exp(first.topk_logprobs[row, 0]):.3f}" in out
    for split in ("train", "validation"):
        image = matplotlib.image.imread(tmp_path / f"figure-{split}.png")
        assert image.shape[:2] == (975, 1430) and image.std() > 0.05  # drawn upon, by inch and dpi


@pytest.fixture
def statistics(tmp_path):
    path = write_cache(tmp_path / "c", make_samples(count=COUNT), licence="MIT")
    return cache_statistics(CacheReader(path))


def test_the_figure_shows_the_statistics(statistics):
    """Each panel's marks, in data units, are the numbers of the tables."""
    figure = figure_of(statistics, "a title")
    mass, entropy, ranks, spent = figure.axes
    assert figure.get_suptitle() == "a title"
    for panel, values in ((mass, statistics.mass), (entropy, statistics.entropy_nats)):
        heights = [bar.get_height() for bar in panel.patches]
        edges = [bar.get_x() for bar in panel.patches]
        assert sum(heights) == statistics.positions == values.size
        assert heights[0] == (values < edges[1]).sum()
        assert panel.lines[0].get_xdata()[0] == pytest.approx(values.mean())
        assert f"{values.mean():.3f}" in panel.get_title()
        assert panel.get_xlim()[0] == 0 and panel.get_ylabel() == "positions"
    low, middle, high = statistics.rank_quantiles_nats
    assert ranks.lines[0].get_xdata().tolist() == list(range(1, 9))
    np.testing.assert_allclose(ranks.lines[0].get_ydata(), middle)
    band = ranks.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(low.min()) and band.max() == pytest.approx(high.max())
    names = [label.get_text() for label in spent.get_yticklabels()]
    widths = [bar.get_width() for bar in spent.patches]
    assert dict(zip(names, widths, strict=True)) == statistics.bytes_per_position
    assert widths == sorted(widths)


def test_statistics_are_what_they_say(tmp_path):
    ids = np.array([[1, 2], [3, 4], [5, -1]])
    probabilities = np.array([[0.5, 0.25], [0.6, 0.4], [0.7, 0.0]])
    with np.errstate(divide="ignore"):
        logprobs = np.log(probabilities)
    tokens = np.array([9, 2, 3, 8])
    mask = np.array([1, 1, 1, 0])
    path = write_cache(tmp_path / "c", [(tokens, mask, ids, logprobs)], topk=2, codec="fp16")
    found = cache_statistics(CacheReader(path))
    np.testing.assert_allclose(found.mass, [0.75, 1.0, 0.7], atol=1e-6)
    want = [
        -(0.5 * np.log(0.5) + 2 * 0.25 * np.log(0.25)),
        -(0.6 * np.log(0.6) + 0.4 * np.log(0.4)),
        -(0.7 * np.log(0.7) + 0.3 * np.log(0.3)),
    ]
    np.testing.assert_allclose(found.entropy_nats, want, atol=2e-3)
    assert found.label_kept == pytest.approx(2 / 3) and found.label_first == pytest.approx(1 / 3)
    assert found.candidates.tolist() == [2, 2, 1]
    size = CacheReader(path).shards[0].bytes
    assert found.total_bytes_per_position == pytest.approx(size / 3)
