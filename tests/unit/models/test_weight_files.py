"""Downloads that did not end, and directories that hold no tokenizer: one sentence, at once."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_kd.data.prepare.documents import load_tokenizer
from megatron_kd.models.fingerprint import model_directory
from megatron_kd.models.weight_files import check_weight_files

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.zeros(3, 5), "b": torch.ones(7)}, tmp_path / "model.safetensors")
    return tmp_path


def test_whole_weights_pass(model):
    assert model_directory(model) == model
    save_file({}, model / "empty.safetensors")
    check_weight_files(model)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_in_the_place_of_weights_is_named(model, name):
    (model / name).write_text(POINTER)
    with pytest.raises(ValueError, match=f"{name} is a git-lfs pointer.*git lfs pull"):
        model_directory(model)


def test_every_length_that_is_too_short_is_refused(model):
    whole = (model / "model.safetensors").read_bytes()
    for length in range(len(whole)):
        (model / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors .*download it again"):
            check_weight_files(model)


@pytest.mark.parametrize("header", [b"[]", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b"\xff{}"])
def test_a_header_of_another_format_is_refused(model, header):
    content = len(header).to_bytes(8, "little") + header + b"\0" * 64
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="does not begin as a safetensors file does"):
        check_weight_files(model)


@pytest.mark.parametrize("name", ["/nowhere/tokenizer", "./tokenizer", "a/b/c", "tokenizers/mine/"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name):
    with pytest.raises(ValueError, match="no such directory"):
        load_tokenizer(name)


def test_a_model_without_a_tokenizer_is_said(model):
    with pytest.raises(ValueError, match="no tokenizer at"):
        load_tokenizer(model)
