import gzip
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from megatron_kd import cli
from megatron_kd.data.prepare.documents import tokenizer_hash
from megatron_kd.data.sequences import SequenceReader

EOS = 2  # <|im_end|>
WORDS = "the cat sat on a mat while rain fell over seven old hills".split()


def texts(count, seed=0):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, int(random.integers(5, 120)))) for _ in range(count)]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare(tokenizer, output, *options, length=64):
    arguments = ["prepare", "--tokenizer", str(tokenizer), "--output", str(output)]
    return cli.main([*arguments, "--seq-length", str(length), *map(str, options)])


def documents_of(reader):
    """Every document piece with its mask, as block packing keeps them."""
    for sequence in reader:
        for start, end in zip(sequence.cu_seqlens[:-1], sequence.cu_seqlens[1:], strict=True):
            yield sequence.tokens[start:end], sequence.loss_mask[start:end]


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("packing", ["none", "naive", "block"])
def test_text_packings(packing, smollm2_dir, smollm2_tokenizer, tmp_path):
    lines = texts(60)
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in lines])
    assert prepare(smollm2_dir, tmp_path / "out", "--input", source, "--packing", packing) == 0
    readers = [SequenceReader(tmp_path / "out" / name) for name in ("train", "validation")]
    wanted = {tuple([*smollm2_tokenizer(text).input_ids, EOS]) for text in lines}
    predicted = np.zeros(0, int)
    for reader in readers:
        manifest = reader.manifest
        assert manifest["packing"] == packing and manifest["seq_length"] == 64
        assert manifest["vocab_size"] == 49152 and manifest["template"] is None
        assert manifest["tokenizer"] == tokenizer_hash(smollm2_tokenizer)
        room = manifest["samples"] * 65
        assert manifest["fill_rate"] == pytest.approx(manifest["tokens"] / room, abs=1e-6)
        for sequence in reader:
            n = len(sequence.tokens)
            assert 2 <= n <= 65 and len(sequence.loss_mask) == n and not sequence.loss_mask[-1]
            documents = len(sequence.cu_seqlens) - 1
            assert documents == 1 or packing == "block"
            if packing == "naive":  # the loss is on at the boundaries too
                assert sequence.loss_mask[:-1].all()
            else:
                ends = sequence.cu_seqlens[1:] - 1
                assert not sequence.loss_mask[ends].any()
                assert sequence.loss_mask.sum() == n - documents
            predicted = np.append(predicted, sequence.tokens[1:][sequence.loss_mask[:-1]])
    total = sum(len(tokens) - 1 for tokens in map(list, wanted))
    if packing != "naive":
        assert len(wanted) == 60  # all distinct, so the sum counts each document
        assert len(predicted) == total
    pieces = sum(reader.manifest["pieces"] for reader in readers)
    samples = sum(reader.manifest["samples"] for reader in readers)
    assert (pieces == samples) == (packing == "none")
    if packing != "none":
        assert readers[0].manifest["fill_rate"] > 0.9


def test_packing_changes_no_token_of_any_document(smollm2_dir, smollm2_tokenizer, tmp_path):
    lines = texts(40, seed=1)
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in lines])
    found = {}
    for packing in ("none", "block"):
        out = tmp_path / packing
        assert prepare(smollm2_dir, out, "--input", source, "--packing", packing) == 0
        readers = [SequenceReader(out / name) for name in ("train", "validation")]
        found[packing] = sorted(
            (tuple(tokens), tuple(mask))
            for reader in readers
            for tokens, mask in documents_of(reader)
        )
    assert found["none"] == found["block"]
    short = {tuple([*smollm2_tokenizer(text).input_ids, EOS]) for text in lines}
    short = {tokens for tokens in short if len(tokens) <= 65}
    assert len(short) > 5 and short <= {tokens for tokens, _ in found["block"]}


def test_same_input_same_bytes(smollm2_dir, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts(50)])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        source = source.rename(tmp_path / name / "in.jsonl")  # its place does not matter
        options = ("--input", source, "--packing", "block", "--validation-fraction", "0.2")
        assert prepare(smollm2_dir, tmp_path / name / "out", *options) == 0
    assert contents(tmp_path / "one" / "out") == contents(tmp_path / "two" / "out")
    options = ("--input", source, "--packing", "block", "--split-seed", "2")
    assert prepare(smollm2_dir, tmp_path / "three", *options) == 0
    assert contents(tmp_path / "one" / "out") != contents(tmp_path / "three")


def test_no_document_leaks_into_validation(smollm2_dir, tmp_path):
    lines = texts(30) * 3
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in lines])
    options = ("--input", source, "--validation-fraction", "0.3", "--packing", "block")
    assert prepare(smollm2_dir, tmp_path / "out", *options, length=1000) == 0
    train, held_out = (
        {tuple(tokens) for tokens, _ in documents_of(SequenceReader(tmp_path / "out" / name))}
        for name in ("train", "validation")
    )
    assert len(train) + len(held_out) == 30 and not train & held_out and len(held_out) > 3
    counted = SequenceReader(tmp_path / "out" / "validation").manifest["documents"]["text"]
    assert counted == 3 * len(held_out)


def test_every_source_gives_the_same_sequences(smollm2_dir, tmp_path):
    records = [{"text": text} for text in texts(30)]
    lines = write_lines(tmp_path / "in.jsonl", records)
    with gzip.open(tmp_path / "in.jsonl.gz", "wt") as file:
        file.write(lines.read_text())
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "in.parquet")
    data = datasets.Dataset.from_list(records)
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": data, "other": data.select([0])}).save_to_disk(
        str(tmp_path / "dict")
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "a.jsonl", records[:11])
    pq.write_table(pa.Table.from_pylist(records[11:]), folder / "b.parquet")
    sources = {
        "jsonl": (lines,),
        "gz": (tmp_path / "in.jsonl.gz",),
        "parquet": (tmp_path / "in.parquet",),
        "saved": (tmp_path / "saved",),
        "dict": (tmp_path / "dict", "--hf-split", "train"),
        "folder": (folder,),
        "two": (folder / "a.jsonl", folder / "b.parquet"),
    }
    results = {}
    for name, source in sources.items():
        out = tmp_path / "out" / name
        assert prepare(smollm2_dir, out, "--packing", "block", "--input", *source) == 0
        results[name] = contents(out)
    assert all(result == results["jsonl"] for result in results.values())


def test_conversations(smollm2_dir, smollm2_tokenizer, tmp_path):
    talks = [
        [
            {"role": "user", "content": f"Count to {i}."},
            {"role": "assistant", "content": " ".join(map(str, range(1, i + 1)))},
        ]
        for i in range(1, 30)
    ]
    lines = write_lines(tmp_path / "in.jsonl", [{"messages": talk} for talk in talks])
    pq.write_table(pa.Table.from_pylist([{"messages": t} for t in talks]), tmp_path / "in.parquet")
    for name, source in (("a", lines), ("b", tmp_path / "in.parquet")):
        options = ("--input", source, "--packing", "block", "--validation-fraction", "0.1")
        assert prepare(smollm2_dir, tmp_path / name, *options, length=128) == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    answers = set()
    for name in ("train", "validation"):
        reader = SequenceReader(tmp_path / "a" / name)
        assert len(reader.manifest["template"]) == 64
        for tokens, mask in documents_of(reader):
            assert smollm2_tokenizer.decode(tokens).startswith("<|im_start|>system")
            answers.add(smollm2_tokenizer.decode(tokens[1:][mask[:-1]]))
    assert answers == {talk[1]["content"] + "<|im_end|>" for talk in talks}


def test_a_long_conversation_keeps_its_beginning_or_goes(smollm2_dir, tmp_path):
    def talk(words):
        question, answer = " ".join(["why"] * words), " ".join(["so"] * 20)
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    records = [{"messages": talk(words)} for words in (1, 2, 30, 500)]
    source = write_lines(tmp_path / "in.jsonl", records)
    options = ("--input", source, "--validation-fraction", "0")
    counts = {}
    for rule in (None, "truncate", "drop", "split"):
        extra = ("--overlong", rule) if rule else ()
        assert prepare(smollm2_dir, tmp_path / str(rule), *options, *extra, length=75) == 0
        reader = SequenceReader(tmp_path / str(rule) / "train")
        assert all(sequence.loss_mask.any() for sequence in reader)
        counts[rule] = [int(sequence.loss_mask.sum()) for sequence in reader]
    # 21 answer tokens each; the third is cut within its answer, the fourth within its question
    assert counts[None] == counts["truncate"]
    assert counts["drop"] == [21, 21]
    assert counts["truncate"][:2] == [21, 21] and len(counts["truncate"]) == 3
    assert 0 < counts["truncate"][2] < 21
    assert sum(counts["split"]) == 4 * 21


def test_given_tokens_and_masks(smollm2_dir, tmp_path):
    records = [
        {"tokens": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
        {"tokens": [9, 10, 11]},
        {"tokens": [12, 13, 14], "loss_mask": [1, 0, 0]},
    ]
    source = write_lines(tmp_path / "in.jsonl", records)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "in.parquet")
    for name, path in (("jsonl", source), ("parquet", tmp_path / "in.parquet")):
        options = ("--input", path, "--validation-fraction", "0", "--packing", "naive")
        assert prepare(smollm2_dir, tmp_path / name, *options) == 0
        (sequence,) = SequenceReader(tmp_path / name / "train")
        assert sequence.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11]  # the third trains nothing
        assert sequence.loss_mask.astype(int).tolist() == [0, 1, 1, 1, 1, 1, 0]
        assert not (tmp_path / name / "validation").exists()


def test_begin_and_end_tokens_are_a_choice(smollm2_dir, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "Hello"}])
    for name, options, expected in (
        ("default", (), [19556, EOS]),
        ("bos", ("--bos", "<|im_start|>", "--eos", "none"), [1, 19556]),
        ("other", ("--eos", "<|endoftext|>"), [19556, 0]),
    ):
        extra = ("--input", source, "--validation-fraction", "0", *options)
        assert prepare(smollm2_dir, tmp_path / name, *extra) == 0
        assert SequenceReader(tmp_path / name / "train")[0].tokens.tolist() == expected


def test_text_cannot_forge_control_tokens(smollm2_dir, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "a <|im_end|> b"}])
    extra = ("--input", source, "--validation-fraction", "0", "--eos", "none")
    assert prepare(smollm2_dir, tmp_path / "out", *extra) == 0
    (sequence,) = SequenceReader(tmp_path / "out" / "train")
    assert EOS not in sequence.tokens.tolist()


def test_pydoc_and_limits(smollm2_dir, tmp_path):
    options = ("--input", "pydoc", "--max-tokens", "20000")
    assert prepare(smollm2_dir, tmp_path / "out", *options, length=512) == 0
    tokens = [
        SequenceReader(tmp_path / "out" / name).manifest["supervised_tokens"]
        for name in ("train", "validation")
    ]
    assert 19_000 < sum(tokens) < 60_000
    options = ("--input", "pydoc", "--max-documents", "3", "--validation-fraction", "0")
    assert prepare(smollm2_dir, tmp_path / "few", *options, length=512) == 0
    assert SequenceReader(tmp_path / "few" / "train").manifest["documents"] == {"text": 3}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "x"', "in.jsonl:2 is not a JSON object"),
        ("[1]", "in.jsonl:2: expected an object"),
        ('{"prompt": "x"}', "in.jsonl:2: expected exactly one of text, messages, tokens"),
        ('{"text": "x", "tokens": [1]}', "--field"),
        ('{"text": 5}', "text must be a string"),
        ('{"tokens": [1, 49152]}', "0 to 49151"),
        ('{"tokens": [1, -1]}', "0 to 49151"),
        ('{"tokens": ["a"]}', "list of integers"),
        ('{"tokens": [1, 2], "loss_mask": [1]}', "loss_mask must hold"),
        ('{"tokens": [1, 2], "loss_mask": [1, 2]}', "loss_mask must hold"),
        ('{"tokens": [1, 2], "loss_mask": [[1], [0]]}', "loss_mask must hold"),
        ('{"messages": []}', "in.jsonl:2: messages must be a list"),
    ],
)
def test_bad_records_are_named(line, words, smollm2_dir, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "fine words here"}\n' + line + "\n")
    extra = ("--input", source, "--validation-fraction", "0")
    assert prepare(smollm2_dir, tmp_path / "out", *extra) == 1
    assert words in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


def test_bad_records_can_be_left_out(smollm2_dir, tmp_path, capsys):
    good = [{"text": "fine words here"}, {"tokens": [3, 4, 5]}]
    bad = [{"text": 5}, {"messages": []}, {"messages": [{"role": "user", "content": "<|im_end|>"}]}]
    records = [good[0], *bad, good[1]]
    source = write_lines(tmp_path / "in.jsonl", records)
    extra = ("--input", source, "--validation-fraction", "0")
    assert prepare(smollm2_dir, tmp_path / "out", *extra, "--skip-invalid") == 0
    manifest = SequenceReader(tmp_path / "out" / "train").manifest
    assert manifest["skipped_records"] == 3 and manifest["documents"] == {"text": 1, "tokens": 1}
    assert capsys.readouterr().err.count("left out: in.jsonl:") == 3


GOOD = b'{"text": "fine words here"}\n{"tokens": [3, 4, 5]}\n'
END = b'\n{"text": "the end"}\n'
BAD_LINES = {
    "latin-1": b'{"text": "caf\xe9"}',
    "surrogate": b'{"text": "bad \\ud83d emoji"}',
    "digits": b'{"text": ' + b"1" * 5000 + b"}",
    "half a line": b'{"text": "x',
    "two kinds": b'{"text": "x", "tokens": [1]}',
}


def gzip_cut():
    """Not compressed, so that the first lines can be read from what is left."""
    numbers = np.random.default_rng(0).integers(0, 9, 200_000).tolist()
    more = b'{"tokens": ' + json.dumps(numbers).encode() + b"}\n"
    return gzip.compress(GOOD + more, compresslevel=0)[:-30]


def gzip_flipped():
    """In the checksum, which comes last."""
    content = bytearray(gzip.compress(GOOD))
    content[-6] ^= 255
    return bytes(content)


def damaged(folder, kind):
    """A file whose third record cannot be read, or whose end is missing."""
    if kind in BAD_LINES:
        path = folder / "in.jsonl"
        path.write_bytes(GOOD + BAD_LINES[kind] + END)
    elif kind in ("plain", "cut", "flipped"):
        path = folder / "in.jsonl.gz"
        path.write_bytes({"plain": lambda: GOOD, "cut": gzip_cut, "flipped": gzip_flipped}[kind]())
    else:
        path = folder / "in.parquet"
        values = [b"fine words", b"caf\xe9" if kind == "parquet bytes" else b"x", b"the end"]
        pq.write_table(pa.table({"text": pa.array(values, pa.binary()).view(pa.string())}), path)
        if kind == "parquet cut":
            path.write_bytes(path.read_bytes()[:-10])
    return path


@pytest.mark.parametrize(
    ("kind", "words", "documents"),
    [
        ("latin-1", "in.jsonl:3 is not UTF-8: the byte 0xe9 after 13 characters", 3),
        ("surrogate", "in.jsonl:3: text holds half of a surrogate pair, \\ud83d at character 4", 3),
        ("digits", "in.jsonl:3 is not a JSON object", 3),
        ("half a line", "in.jsonl:3 is not a JSON object", 3),
        ("two kinds", "in.jsonl:3: expected exactly one of", 3),
        ("plain", "in.jsonl.gz cannot be unpacked after line 0", 0),
        ("cut", "in.jsonl.gz cannot be unpacked after line 2", 2),
        ("flipped", "in.jsonl.gz cannot be unpacked after line 2", 2),
        ("parquet bytes", "in.parquet row 1 is not UTF-8", 2),
        ("parquet cut", "in.parquet cannot be read from row 0 on", 0),
    ],
)
def test_what_cannot_be_read_is_named_and_can_be_left_out(
    kind, words, documents, smollm2_dir, tmp_path, capsys
):
    (tmp_path / "fine.jsonl").write_text('{"text": "one more"}\n')
    inputs = ("--input", damaged(tmp_path, kind), tmp_path / "fine.jsonl")
    options = (*inputs, "--validation-fraction", "0")
    assert prepare(smollm2_dir, tmp_path / "out", *options) == 1
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
    assert prepare(smollm2_dir, tmp_path / "out", *options, "--skip-invalid") == 0
    assert f"left out: {words}" in capsys.readouterr().err
    manifest = SequenceReader(tmp_path / "out" / "train").manifest
    assert manifest["skipped_records"] == 1
    assert sum(manifest["documents"].values()) == documents + 1


def test_what_is_left_untrained_is_counted_with_its_reason(smollm2_dir, tmp_path, capsys):
    asked, answer = ({"role": role, "content": "so " * 9} for role in ("user", "assistant"))
    records = [
        {"messages": [asked]},
        {"messages": [asked]},
        {"messages": [{**asked, "content": "why " * 90}, answer]},
        {"messages": [asked, answer]},
        {"tokens": [5]},
        {"tokens": [5] * 90, "loss_mask": [1] * 3 + [0] * 87},
    ]
    source = write_lines(tmp_path / "in.jsonl", records)
    options = ("--input", source, "--validation-fraction", "0")
    assert prepare(smollm2_dir, tmp_path / "out", *options) == 0
    error = capsys.readouterr().err
    assert "train: left out as nothing could be trained: " in error
    assert "2 messages without a token to learn" in error
    assert "1 pieces cut from messages that have not a token to learn" in error
    assert "1 shorter than two tokens" in error
    assert prepare(smollm2_dir, tmp_path / "two", *options, "--overlong", "drop") == 0
    assert "2 longer than a sequence" in capsys.readouterr().err


def test_text_that_was_rendered_for_a_chat_is_pointed_out(smollm2_dir, tmp_path, capsys):
    records = [{"text": "<|im_start|>user\nx<|im_end|>"}, {"text": "plain words"}]
    source = write_lines(tmp_path / "in.jsonl", records)
    options = ("--input", source, "--validation-fraction", "0")
    assert prepare(smollm2_dir, tmp_path / "out", *options) == 0
    assert "warning: 1 texts spell control tokens" in capsys.readouterr().err


def test_turns_without_an_end_are_pointed_out(smollm2_dir, tmp_path, capsys, monkeypatch):
    used = AutoTokenizer.from_pretrained(str(smollm2_dir), use_fast=True)  # the one prepare gets
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    monkeypatch.setattr(used, "chat_template", template + prompt)
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    source = write_lines(tmp_path / "in.jsonl", [{"messages": talk}])
    options = ("--input", source, "--validation-fraction", "0")
    assert prepare(smollm2_dir, tmp_path / "out", *options) == 0
    assert "warning: 1 assistant turns are ended by no control token" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_chat_is_no_fault_of_the_records(
    smollm2_dir, tmp_path, capsys, monkeypatch
):
    used = AutoTokenizer.from_pretrained(str(smollm2_dir), use_fast=True)  # the one prepare gets
    monkeypatch.setattr(used, "chat_template", None)
    source = write_lines(
        tmp_path / "in.jsonl", [{"messages": [{"role": "user", "content": "x"}]}, {"text": "y z"}]
    )
    assert prepare(smollm2_dir, tmp_path / "out", "--input", source, "--skip-invalid") == 1
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seq-length", "0"), "--seq-length"),
        (("--validation-fraction", "1"), "--validation-fraction"),
        (("--eos", "</s>"), "no token of this tokenizer"),
        (("--max-documents", "0"), "--max-documents"),
        (("--hf-split", "train", "--input", "SAVED"), "without splits"),
        (("--input", "missing.jsonl"), "no input missing.jsonl"),
        (("--input", "EMPTY"), "no documents"),
        (("--input", "FOLDER"), "holds no .jsonl"),
        (("--input", "README"), "no .jsonl"),
        (("--tokenizer", "no/such/tokenizer"), "no tokenizer at no/such/tokenizer"),
    ],
)
def test_bad_options(options, words, smollm2_dir, tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts(5)])
    datasets.Dataset.from_list([{"text": "x y z"}]).save_to_disk(str(tmp_path / "SAVED"))
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "README").write_text("hello")
    (tmp_path / "EMPTY.jsonl").write_text("\n")
    places = {"EMPTY": "EMPTY.jsonl", "SAVED": "SAVED", "FOLDER": "FOLDER", "README": "README"}
    options = [str(tmp_path / places[o]) if o in places else o for o in options]
    assert prepare(smollm2_dir, tmp_path / "out", "--input", source, *options) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_overwriting_is_asked_for(smollm2_dir, tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts(5)])
    assert prepare(smollm2_dir, tmp_path / "out", "--input", source) == 0
    before = contents(tmp_path / "out")
    assert prepare(smollm2_dir, tmp_path / "out", "--input", source, length=32) == 1
    assert "--overwrite" in capsys.readouterr().err and contents(tmp_path / "out") == before
    bad = write_lines(tmp_path / "bad.jsonl", [{"text": "fine"}, {"text": 5}])
    assert prepare(smollm2_dir, tmp_path / "out", "--input", bad, "--overwrite") == 1
    assert contents(tmp_path / "out") == before
    assert prepare(smollm2_dir, tmp_path / "out", "--input", source, "--overwrite", length=32) == 0
    assert contents(tmp_path / "out") != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "in.jsonl", "out"]
