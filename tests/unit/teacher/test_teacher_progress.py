import re

import pytest

from megatron_kd.teacher.capture import progress
from megatron_kd.teacher.capture.progress import CaptureProgress


@pytest.mark.parametrize(
    ("batch", "batch_s"), [(1, 0.001), (1, 3.0), (8, 40.0), (64, 5.0)], ids=str
)
def test_estimate_is_right_however_rows_come_in(batch, batch_s, monkeypatch, capsys):
    """Rows arrive in bursts of `batch` documents of 10 rows every `batch_s` seconds, without an end
    in sight."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = CaptureProgress("train", 10**6, 5_000)
    for _ in range(10_000):
        now[0] += batch_s
        for _ in range(batch):
            shown.advance(10)
            if shown.wants_estimate and shown.ready_to_estimate:
                shown.estimate(250.0)
        if not shown.wants_estimate:
            break
    words = capsys.readouterr().err
    rate = float(re.search(r"at ([\d,]+)/s", words)[1].replace(",", ""))
    assert rate == pytest.approx(10 * batch / batch_s, rel=0.15, abs=0.5)
    assert "250.0 MB" in words and "only 5.0 kB are free" in words
    assert now[0] - 100 <= max(3 * batch_s, 4.0)
