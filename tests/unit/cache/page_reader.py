"""A second reader, written from docs/cache-format.md alone: plain Python, no library code."""

import hashlib
import json
import math
import struct
from pathlib import Path

import xxhash


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def sha256(value):
    return hashlib.sha256(canonical(value).encode()).hexdigest()


class PageReader:
    """samples(): one dict per sample, rows as lists of (id, log-probability)."""

    def __init__(self, folder):
        self.folder = Path(folder)
        text = (self.folder / "manifest.json").read_text()
        self.manifest = json.loads(text)
        assert canonical(self.manifest) == text
        assert self.manifest["format"] == "megatron-kd cache"
        assert self.manifest["version"] == (2 if self.manifest.get("label_logprob") else 1)
        without = dict(self.manifest)
        assert without.pop("checksum") == sha256(without)
        fingerprint = without.pop("fingerprint")
        del without["origin"]
        assert fingerprint == sha256(without)
        for key in ("format", "version", "samples", "positions", "shards"):
            del without[key]
        self.spec = without
        assert canonical(self.spec) == (self.folder / "spec.json").read_text()

    def samples(self):
        for number, entry in enumerate(self.manifest["shards"]):
            assert entry["file"] == f"shard-{number:06d}.safetensors"
            content = (self.folder / entry["file"]).read_bytes()
            assert len(content) == entry["bytes"]
            assert xxhash.xxh3_128_hexdigest(content) == entry["xxh3_128"]
            yield from self._shard(content, entry)

    def _shard(self, content, entry):
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        own = json.loads(header.pop("__metadata__")["megatron_kd"])
        assert own["spec"] == sha256(self.spec) and own["shard"] == entry["shard"]
        codes = {"U8": "B", "U16": "H", "U32": "I", "I32": "i", "U64": "Q", "F16": "e", "F32": "f"}
        self.tensors = {}
        for name, about in header.items():
            begin, end = about["data_offsets"]
            data = content[8 + length + begin : 8 + length + end]
            if about["dtype"] == "BF16":
                halves = struct.unpack(f"<{len(data) // 2}H", data)
                packed = struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves))
                self.tensors[name] = struct.unpack(f"<{len(halves)}f", packed)
            else:
                code = codes[about["dtype"]]
                count = len(data) // struct.calcsize(code)
                self.tensors[name] = struct.unpack(f"<{count}{code}", data)
        self.mask_at = self.high_at = 0
        for index in range(entry["samples"]):
            yield self._sample(index)

    def _between(self, tensor, offsets, index, width=1):
        begin, end = self.tensors[offsets][index : index + 2]
        return self.tensors[tensor][begin * width : end * width]

    def _sample(self, index):
        if self.spec["vocab_size"] > 65536:
            raw = self._between("tokens", "token_offsets", index, 3)
            tokens = [a | b << 8 | c << 16 for a, b, c in zip(*[iter(raw)] * 3, strict=True)]
        else:
            tokens = list(self._between("tokens", "token_offsets", index))
        as_bytes = struct.pack(f"<{len(tokens)}i", *tokens)
        assert xxhash.xxh3_64_intdigest(as_bytes) == self.tensors["token_hash"][index]
        size = math.ceil(len(tokens) / 8)
        bits = self.tensors["loss_mask"][self.mask_at : self.mask_at + size]
        self.mask_at += size
        begin, end = self.tensors["row_offsets"][index : index + 2]
        counts = self.tensors.get("counts", [self.spec["topk"]] * len(self.tensors["mass"]))
        counts = counts[begin:end]
        masses = self.tensors["mass"][begin:end]
        if self.spec["codec"] == "compact":
            masses = [1 - m if math.copysign(1, m) > 0 else -m for m in masses]
            rows = self._compact(index, begin, counts, masses)
        else:
            rows = self._plain(index, counts)
        width = self.spec["hidden_size"]
        return {
            "tokens": tokens,
            "loss_mask": [bool(bits[t // 8] >> t % 8 & 1) for t in range(len(tokens))],
            "cu_seqlens": list(self._between("cu_seqlens", "document_offsets", index)),
            "rows": rows,
            "mass": list(masses),
            "log_z": [
                list(self.tensors[f"log_z.{number}"][begin:end])
                for number in range(len(self.spec["temperatures"]))
            ],
            "label_logprob": list(self.tensors.get("label_logprob", ())[begin:end]),
            "hidden": [
                list(self.tensors["hidden"][row * width : (row + 1) * width])
                for row in range(begin, end)
                if width
            ],
        }

    def _plain(self, index, counts):
        ids = list(self._between("ids", "entry_offsets", index))
        logprobs = self._between("logprobs", "entry_offsets", index)
        if self.spec["vocab_size"] > 65536:
            size = math.ceil(len(ids) / 2)
            pairs = self.tensors["ids_high"][self.high_at : self.high_at + size]
            self.high_at += size
            ids = [i | (pairs[e // 2] >> 4 * (e % 2) & 15) << 16 for e, i in enumerate(ids)]
        entries = iter(zip(ids, logprobs, strict=True))
        return [[next(entries) for _ in range(count)] for count in counts]

    def _compact(self, index, begin, counts, masses):
        stream = bytes(self._between("stream", "stream_offsets", index))
        layout = self.tensors["layout"][begin : begin + len(counts)]
        bottom = self.tensors["bottom"][begin : begin + len(counts)]
        low = [max(0, int(math.log2(max(1, self.spec["vocab_size"] // k)))) for k in counts]
        low_bits = [r & 31 for r in layout]
        total = sum(k * (a + r) for k, a, r in zip(counts, low, low_bits, strict=True))
        cut = math.ceil(total / 8)
        middle = cut + self.tensors["high_bytes"][index]
        fields, highs, tops = map(Bits, (stream[:cut], stream[cut:middle], stream[middle:]))
        rows = []
        for k, a, r, flags, b, mass in zip(
            counts, low, low_bits, layout, bottom, masses, strict=True
        ):
            row, high = [], 0
            for _ in range(k):
                field = fields.take(a + r)
                high += highs.zeros()
                e = field >> a
                if not flags & 0x80:
                    e += tops.zeros() << r
                row.append((high << a | field & (1 << a) - 1, -(b - e) * 5 / 512))
            row.sort(key=lambda entry: (-entry[1], entry[0]))
            rows.append(self._with_top(row, mass))
        return rows

    @staticmethod
    def _with_top(row, mass):
        token, first = row[0]
        if mass >= 2**-13 and math.exp(first) >= 2 / 3 * mass:
            rest = mass - sum(math.exp(logprob) for _, logprob in row[1:])
            better = math.log(rest) if rest > 0 else -math.inf
            if abs(better - first) <= 5 / 512:
                floor = row[1][1] if len(row) > 1 else -math.inf
                return [(token, max(better, floor)), *row[1:]]
        return row


class Bits:
    """Reads from the lowest bit of the first byte on."""

    def __init__(self, data):
        self.value, self.at = int.from_bytes(data, "little"), 0

    def take(self, count):
        found = self.value >> self.at & (1 << count) - 1
        self.at += count
        return found

    def zeros(self):
        count = 0
        while not self.take(1):
            count += 1
        return count
