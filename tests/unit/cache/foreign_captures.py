"""Writes captures as Megatron-LM and DistillKit do, by their formats' descriptions."""

import io
import json
import tarfile

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import yaml


def write_megatron(
    folder,
    samples,
    *,
    version,
    ranks,
    micro_batch,
    batch,
    contexts=1,
    steps_per_tar=2,
    dtype=torch.float16,
    ranges=False,
):
    """samples: (ids [s, K] int64 with -1 unused, logprobs [s, K]) in training order."""
    folder.mkdir()
    saver = {"k": samples[0][0].shape[1], "p": None, "min_k": 1, "save_dtype": "fp16"}
    if version == 2:
        saver |= {
            "format_version": 2,
            "mbs_save": micro_batch,
            "dp_size_save": ranks,
            "gbs_save": batch,
        }
    steps = len(samples) // batch
    for rank in range(ranks):
        for context in range(contexts):
            for begin in range(0, steps, steps_per_tar):
                span = range(begin, min(begin + steps_per_tar, steps))
                members = {}
                for step in span:
                    name = f"{step * batch}-{(step + 1) * batch}" if ranges else f"{step}"
                    members[f"{name}.pt.zst"] = _megatron_step(
                        samples,
                        step * batch,
                        version,
                        ranks,
                        rank,
                        micro_batch,
                        batch,
                        contexts,
                        context,
                        dtype,
                    )
                last = f"{span[0] * batch}-{(span[-1] + 1) * batch}" if ranges else f"{span[-1]}"
                prefix = f"cp{context}_" if version == 1 else ""
                _write_tar(folder / f"{prefix}dp{rank}__{last}.tar", {"saver": saver}, members)
    return folder


def _megatron_step(
    samples, first, version, ranks, rank, micro_batch, batch, contexts, context, dtype
):
    values, low, high = [], [], []
    for number in range(batch // (micro_batch * ranks)):
        at = first + (number * ranks + rank) * micro_batch
        part = samples[at : at + micro_batch]
        ids = _context_slice(np.stack([ids for ids, _ in part], 1), contexts, context)
        logprobs = _context_slice(np.stack([p for _, p in part], 1), contexts, context)
        ids = torch.from_numpy(ids)
        values.append(torch.from_numpy(np.where(np.isneginf(logprobs), -1e4, logprobs)).to(dtype))
        low.append((ids & 0xFFFF).to(torch.uint16))
        high.append((ids >> 16).to(torch.bool))  # true for -1 as well
    saved = {"values": values, "indices_low": low, "bit_17": high}
    if version == 2:
        saved = {name: torch.cat(tensors, dim=1) for name, tensors in saved.items()}
        packed = np.packbits(saved["bit_17"].numpy().ravel())
        saved |= {"bit_17": torch.from_numpy(packed), "format_version": 2}
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    return pyarrow.compress(buffer.getvalue(), codec="zstd", asbytes=True)


def _context_slice(array, contexts, context):
    """The two chunks of 2C that a context rank holds."""
    chunks = np.split(array, 2 * contexts)
    if contexts == 1:
        return array
    return np.concatenate([chunks[context], chunks[2 * contexts - 1 - context]])


def _write_tar(path, meta, members):
    with tarfile.open(path, "w") as tar:
        for name, content in {"_meta.json": json.dumps(meta).encode(), **members}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_distillkit(folder, samples, config, *, rows_per_file=3):
    """samples: (tokens [n], ids [n - 1, k], logprobs [n - 1, k] by falling probability)."""
    folder.mkdir()
    (folder / "compression_config.yaml").write_text(yaml.safe_dump(config))
    lists = pyarrow.list_(pyarrow.list_(pyarrow.uint8()))
    schema = pyarrow.schema(
        [
            ("input_ids", pyarrow.list_(pyarrow.uint64())),
            ("compressed_logprobs", lists),
            ("bytepacked_indices", lists),
        ]
    )
    bits = int(np.ceil(np.log2(config["d"])))
    for number in range(0, len(samples), rows_per_file):
        part = samples[number : number + rows_per_file]
        columns = [
            [tokens.tolist() for tokens, _, _ in part],
            [_compressed(logprobs, config).tolist() for _, _, logprobs in part],
            [_packed(ids, bits).tolist() for _, ids, _ in part],
        ]
        arrays = [pyarrow.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
        table = pyarrow.Table.from_arrays(arrays, schema=schema)
        pyarrow.parquet.write_table(table, folder / f"data_{number // rows_per_file}.parquet")
    return folder


def _packed(values, bits):
    """[rows, count] to [rows, bytes], highest bit first."""
    spread = (values[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    return np.packbits(spread.reshape(values.shape[0], -1).astype(np.uint8), axis=1)


def _bytes(values, dtype):
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype))
    return tensor.view(torch.uint8).numpy().reshape(values.shape[0], -1)


def _compressed(logprobs, config):
    values = logprobs.astype(np.float64)
    if config["delta_encoding"]:
        values = np.diff(values, axis=1, prepend=0.0)
    exact, rest = np.split(values, [config["exact_k"]], axis=1)
    chunks = [_bytes(exact, config["exact_dtype"])]
    if config["polynomial_terms"]:
        points = np.arange(rest.shape[1], dtype=np.float64)
        if config.get("normalize_t"):
            points = np.linspace(0, 1, rest.shape[1])
        terms = np.stack(
            [np.sqrt(points) if t == "sqrt" else points**t for t in config["polynomial_terms"]], 1
        )
        fit = np.linalg.lstsq(terms, rest.T, rcond=None)[0].T
        chunks.append(_bytes(fit, config["term_dtype"]))
        rest = rest - fit @ terms.T
    at = 0
    for part in config["residual_bins"]:
        bits, count = part["element_bits"], part["num_elements"]
        values = rest[:, at : at + count]
        scale = np.abs(values).max(axis=1, keepdims=True) / (1 << (bits - 1))
        codes = np.clip(np.rint(values / scale), -(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        chunks += [
            _bytes(scale, part["scale_dtype"]),
            _packed((codes + (1 << (bits - 1))).astype(np.int64), bits),
        ]
        at += count
    return np.concatenate(chunks, axis=1)
