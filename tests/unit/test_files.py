"""The ground floor for files: names that appear whole, and headers that cannot lie."""

import json
import os
import stat

import numpy as np
import pytest
import safetensors.numpy

from megatron_kd.files import (
    SafetensorsError,
    SafetensorsHeader,
    canonical_json,
    file_checksum,
    map_tensors,
    publish,
    published_directory,
)


def test_a_file_is_replaced_whole_or_stays(tmp_path):
    file = tmp_path / "record.json"
    publish(file, "naïve")
    assert file.read_text(encoding="utf-8") == "naïve"
    publish(file, b"\x00\x01")
    assert file.read_bytes() == b"\x00\x01"
    with pytest.raises(TypeError):
        publish(file, 7)
    assert file.read_bytes() == b"\x00\x01" and os.listdir(tmp_path) == ["record.json"]


def test_a_directory_appears_whole_with_the_modes_the_umask_allows(tmp_path):
    with published_directory(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "private").write_text("x")
        (folder / "inner" / "private").chmod(0o600)
        assert not (tmp_path / "out").exists()
    mode = stat.S_IMODE((tmp_path / "out" / "inner" / "private").stat().st_mode)
    assert mode == stat.S_IMODE((tmp_path / "out").stat().st_mode) & 0o666
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_directory_leaves_the_older_one(tmp_path, overwrite):
    if overwrite:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "old").write_text("old")
    with (
        pytest.raises(RuntimeError),
        published_directory(tmp_path / "out", overwrite=overwrite) as folder,
    ):
        (folder / "new").write_text("half")
        raise RuntimeError("the disk is gone")
    assert os.listdir(tmp_path) == (["out"] if overwrite else [])
    if overwrite:
        assert os.listdir(tmp_path / "out") == ["old"]
        with published_directory(tmp_path / "out", overwrite=True) as folder:
            (folder / "new").write_text("whole")
        assert os.listdir(tmp_path / "out") == ["new"]
    with published_directory(tmp_path / "other"):
        pass
    with pytest.raises(FileExistsError), published_directory(tmp_path / "other"):
        pass


def test_json_has_one_text():
    assert canonical_json({"b": "é", "a": [1, 2.5]}) == '{"a":[1,2.5],"b":"\\u00e9"}'
    with pytest.raises(ValueError):
        canonical_json(float("nan"))


LAYOUT = {"a": ("F32", ("n", 2)), "b": ("I64", ("n",)), "c": ("U8", ("m",))}


@pytest.fixture
def file(tmp_path):
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(3, 2),
        "b": np.arange(3),
        "c": np.arange(5, dtype=np.uint8),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", {"key": "value"})
    return tmp_path / "x.safetensors"


def header_of(content):
    return SafetensorsHeader.parse(content[: 8 + (1 << 20)], len(content))


def test_tensors_are_mapped_as_they_were_saved(file):
    header = header_of(file.read_bytes())
    assert header.metadata == {"key": "value"}
    with open(file, "rb") as opened:
        tensors, _ = map_tensors(opened, header.place(LAYOUT, {"n": 3}))
    for name, want in safetensors.numpy.load_file(file).items():
        np.testing.assert_array_equal(tensors[name], want)
        assert tensors[name].dtype == want.dtype and not tensors[name].flags.writeable


@pytest.mark.parametrize(
    ("layout", "lengths", "message"),
    [
        ({"a": LAYOUT["a"], "b": LAYOUT["b"]}, {}, "differing: .'c'"),
        (LAYOUT | {"d": ("U8", ("m",))}, {}, "differing: .'d'"),
        (LAYOUT, {"n": 4}, "tensor . must be"),
        (LAYOUT | {"c": ("U8", ("n",))}, {}, "tensor . must be"),
        (LAYOUT | {"a": ("F16", ("n", 2))}, {}, "tensor a must be F16"),
        (LAYOUT | {"a": ("F32", ("n",))}, {}, "tensor a must be F32"),
    ],
)
def test_another_layout_is_refused(file, layout, lengths, message):
    with pytest.raises(SafetensorsError, match=message):
        header_of(file.read_bytes()).place(layout, lengths)


def test_an_optional_tensor_may_be_left_out_and_no_other(file):
    header = header_of(file.read_bytes())
    more = LAYOUT | {"d": ("U8", ("m",))}
    assert set(header.place(more, optional=frozenset({"d"}))) == {"a", "b", "c"}
    with pytest.raises(SafetensorsError, match="differing: .'e'"):
        header.place(more | {"e": ("U8", ("m",))}, optional=frozenset({"d"}))


def test_bytes_of_no_tensor_are_refused(file):
    content = file.read_bytes()
    with pytest.raises(SafetensorsError, match="4 bytes belong to no tensor"):
        header_of(content + b"more").place(LAYOUT)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [at + 8 for at in entry["data_offsets"]]
    text = json.dumps(header).encode()
    shifted = len(text).to_bytes(8, "little") + text + bytes(8) + content[8 + length :]
    with pytest.raises(SafetensorsError, match="gap at byte 0"):
        header_of(shifted).place(LAYOUT)


def test_a_checksum_covers_the_last_byte(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"x" * (1 << 22) + b"a")
    other.write_bytes(b"x" * (1 << 22) + b"b")
    assert file_checksum(one) != file_checksum(other)
