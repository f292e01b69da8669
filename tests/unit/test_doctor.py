"""What the doctor says about packages that are wrong together."""

import pytest

from megatron_kd.tools.doctor import machine


@pytest.fixture
def versions(monkeypatch):
    installed = {"transformers": "4.57.6", "megatron-bridge": "0.3.1"}
    monkeypatch.setattr(machine, "_version", installed.get)
    return installed


def test_the_pinned_packages_are_fine(versions):
    assert machine._transformers().level == "ok"
    assert list(machine._transformer_engine()) == []


def test_transformers_5_beside_bridge_03_is_a_fault(versions):
    versions["transformers"] = "5.8.0"
    finding = machine._transformers()
    assert finding.level == "fault"
    assert "transformers<5" in finding.remedy
    versions["megatron-bridge"] = "0.6.0"
    assert machine._transformers().level == "ok"


def test_the_meta_wheel_of_transformer_engine_alone_is_a_fault(versions):
    versions["transformer-engine"] = "2.9.0"
    (finding,) = machine._transformer_engine()
    assert finding.level == "fault"
    versions["transformer-engine-torch"] = "2.9.0"
    (finding,) = machine._transformer_engine()
    assert finding.level == "ok"
