"""Which proofs are found again, and that none is found for something else."""

import json

import pytest

from megatron_kd.host.parity import record

SUBJECT = {"configuration": {"hidden_size": 64}, "layout": {"tensor_model_parallel_size": 1}}
PROOF = {"largest": 1e-7}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(record.FOLDER_VARIABLE, str(tmp_path / "proofs"))
    return tmp_path


def test_a_proof_is_found_by_its_subject_alone(folder):
    key = record.key_of(SUBJECT)
    assert record.known(key, None) is None
    record.keep(key, PROOF, None)
    assert record.known(key, None) == PROOF
    for other in (
        {"configuration": {"hidden_size": 128}},
        {"layout": {"tensor_model_parallel_size": 2}},
        {"settings": {"window_size": (7, 0)}},
    ):
        assert record.known(record.key_of(SUBJECT | other), None) is None


def test_another_version_of_host_or_code_is_another_subject(monkeypatch):
    key = record.key_of(SUBJECT)
    with monkeypatch.context() as patch:
        patch.setattr(record.importlib.metadata, "version", lambda name: "9.9")
        assert record.key_of(SUBJECT) != key
    monkeypatch.setattr(record, "_code_hash", lambda: "other code")
    assert record.key_of(SUBJECT) != key


@pytest.mark.parametrize("file", ["host/versions/windows.py", "models/transformers_faults.py"])
def test_what_either_side_is_corrected_by_has_a_say_in_the_name(folder, monkeypatch, file):
    monkeypatch.setattr(record, "CODE", folder)
    for name in ("host/versions/windows.py", "models/transformers_faults.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("before")
    before = record._code_hash.__wrapped__()
    (folder / file).write_text("after")
    assert record._code_hash.__wrapped__() != before


def test_the_record_beside_a_run_holds_every_proof_and_serves_another_machine(folder, monkeypatch):
    run = str(folder / "run")
    record.keep("first", PROOF, run)
    record.keep("second", {"largest": 0.0}, run)
    assert json.loads((folder / "run" / record.RECORD).read_text()).keys() == {"first", "second"}
    monkeypatch.setenv(record.FOLDER_VARIABLE, str(folder / "another machine"))
    assert record.known("first", run) == PROOF
    assert record.known("first", None) is None


def test_a_cache_folder_that_cannot_be_written_costs_the_record_there_alone(folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv(record.FOLDER_VARIABLE, str(folder / "file"))
    record.keep("key", PROOF, str(folder / "run"))
    assert record.known("key", str(folder / "run")) == PROOF
    assert record.known("key", None) is None


def test_a_broken_record_is_none(folder):
    record.keep("key", PROOF, str(folder / "run"))
    (folder / "run" / record.RECORD).write_text("{")
    (folder / "proofs" / "parity" / "key.json").write_text("")
    assert record.known("key", str(folder / "run")) is None
