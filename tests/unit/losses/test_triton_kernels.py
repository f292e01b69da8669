"""The Triton kernels without a GPU: in Triton's interpreter against fp64, compiled ahead of time
for three generations of GPUs, and what happens where they cannot be built.

`python tests/unit/losses/test_triton_kernels.py --write` writes `triton_resources.csv` again.
"""

import csv
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_kd.losses import TopKTarget, fused_chunked_kd_loss, kernels
from megatron_kd.losses.kernels import eager, triton

HERE = Path(__file__).parent
RESOURCES = HERE / "triton_resources.csv"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
ODD_VOCABULARY = 50257
GENERATIONS = {80: "A100", 90: "H100, H200", 100: "B200"}
TRANSFORMS = {"identity": 0, "scaled": 1, "capped": 2}
BLOCKS = {"read_rows": triton.READ_BLOCK, "write_rows": triton.WRITE_BLOCK}
LOGITS = ("bf16", "fp16", "fp32")
FIELDS = ("kernel", "logits", "temperatures", "transform", "sm", "registers", "shared_bytes")
MOST_REGISTERS = 65536 // 8 // 32 // 4  # four programs of eight warps fill a multiprocessor


@needs_triton
def test_in_the_interpreter():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, __file__, "--interpret"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=HERE,
    )
    assert done.returncode == 0, done.stderr
    assert "interpreted" in done.stdout


def interpret() -> None:
    from test_losses_kernels import TEMPERATURES, check_against_definition
    from test_losses_logit_transform import KERNEL_TRANSFORMS, check_passes

    for dtype, columns in itertools.product((torch.float32, torch.bfloat16), (37, 4096, 9001)):
        for inverse_taus in TEMPERATURES:
            check_against_definition(triton, dtype, columns, inverse_taus)
    for columns, transform in itertools.product((37, 4097), KERNEL_TRANSFORMS):
        check_passes(triton, torch.float32, columns, (20.0, 1.0), transform)
        check_passes(triton, torch.bfloat16, columns, (1.0,), transform)
    interpret_far_rows()
    interpret_heads()
    assert triton.refusal() is None  # nothing was done by the eager twins
    print("interpreted")


def interpret_far_rows() -> None:
    """A row that begins beyond 2^31 elements; memory that is never touched is never there."""
    stride = 2**31 + 123
    z = torch.empty(stride + 64, dtype=torch.bfloat16).as_strided((2, 37), (stride, 1))
    z.copy_(torch.randn(2, 37, generator=torch.Generator().manual_seed(0)) * 3)
    exact, scales = z.double(), torch.tensor([[0.5, -2.0]])
    m, sums = triton.max_and_sums(z, (0.5,), None)
    terms = ((exact - exact.amax(-1, keepdim=True)) * 0.5).exp()
    torch.testing.assert_close(m.double(), exact.amax(-1))
    torch.testing.assert_close(sums[0].double(), terms.sum(-1), rtol=1e-5, atol=0)
    triton.to_gradient_(z, m, scales, (0.5,), None)
    torch.testing.assert_close(z.double(), scales.T * terms, rtol=1e-2, atol=1e-9)


def interpret_heads() -> None:
    """Whole heads on the kernels: one and a hundred kept ids, unused slots, caps."""
    from loss_cases import assert_close, make_case, run, upstream_of
    from test_losses_logit_transform import BOTH, CAPPED, ordinary, with_transform

    cases = (
        (make_case(support=1, positions=5), {}),
        (make_case(support=100, vocab=150, positions=5, temperature=2.0, captured=True), {}),
        (ordinary(), CAPPED),
        (ordinary(temperature=2.5, captured=True), BOTH),
    )
    for case, options in cases:
        case = case.with_options(tail="bucket", ce_weight=0.3)
        plain, heads = with_transform(options)
        upstream = upstream_of(case)
        truth = run(plain, case, torch.float64, upstream)
        for dtype in (torch.float32, torch.bfloat16):
            yardstick = run(plain, case, dtype, upstream)
            for head in heads[-2:]:
                with kernels.use_backend("triton"):
                    got = run(head, case, dtype, upstream)
                assert_close(got, truth, yardstick, dtype, 4, f"{head.__name__} {dtype}")


def build(kernel: str, logits: str, temperatures: int, transform: str, sm: int):
    """The kernel for rows of an odd vocabulary whose addresses 16 divides, down to machine code."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_kd.losses.kernels import triton_source

    constants = {
        "COLUMNS": ODD_VOCABULARY,
        "TEMPERATURES": temperatures,
        "TRANSFORM": TRANSFORMS[transform],
        "BLOCK": BLOCKS[kernel],
    }
    function = getattr(triton_source, kernel)
    types = dict.fromkeys(constants, "constexpr") | {"row_stride": "i32", "rows": "i32"}
    types |= {"z": f"*{logits}"} | dict.fromkeys(("m", "sums", "scales"), "*fp32")
    names = function.arg_names
    source = ASTSource(
        function,
        {name: types.get(name, "fp32") for name in names},
        constexprs=constants,
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if name == "row_stride" or types.get(name, "").startswith("*")
        },
    )
    target = GPUTarget("cuda", sm, 32)
    return compile_kernel(source, target=target, options={"num_warps": triton.WARPS})


def resources(compiled) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL of the machine code, as NVIDIA's own tool reads them."""
    import triton.backends.nvidia as backend

    tool = Path(backend.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", done.stdout)}


def measured(kernel: str, logits: str, temperatures: int, transform: str, sm: int) -> dict:
    """A line of the table; what no kernel may do is refused here."""
    compiled = build(kernel, logits, temperatures, transform, sm)
    used = resources(compiled)
    assert used["STACK"] == used["LOCAL"] == 0, f"spills to memory: {used}"
    # The blocks inside a row move 16 bytes at a time; the last one alone is masked.
    accesses = re.findall(r"(ld|st)\.global\.(\S+)", compiled.asm["ptx"])
    assert ("ld", "v4.b32") in accesses
    assert ("st", "v4.b32") in accesses or kernel == "read_rows"
    values = kernel, logits, temperatures, transform, sm, used["REG"], used["SHARED"]
    return dict(zip(FIELDS, values, strict=True))


EVERY = list(itertools.product(BLOCKS, LOGITS, (1, 2), TRANSFORMS, GENERATIONS))
FEW = [  # the lightest and the heaviest variant, for each kernel and GPU
    *itertools.product(BLOCKS, ["bf16"], [1], ["identity"], GENERATIONS),
    *itertools.product(BLOCKS, ["fp32"], [2], ["capped"], GENERATIONS),
]


@needs_triton
@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=() if v in FEW else pytest.mark.extended) for v in EVERY],
    ids=lambda variant: " ".join(map(str, variant)),
)
def test_compiled_ahead_of_time(variant):
    with RESOURCES.open() as file:
        known = {tuple(row[name] for name in FIELDS[:5]): row for row in csv.DictReader(file)}
    row = {name: str(value) for name, value in measured(*variant).items()}
    assert row == known[tuple(map(str, variant))], "write the table again, see this file's head"
    assert int(row["registers"]) <= MOST_REGISTERS


def test_the_table_is_whole():
    with RESOURCES.open() as file:
        rows = list(csv.DictReader(file))
    assert [tuple(row[name] for name in FIELDS[:5]) for row in rows] == [
        tuple(map(str, variant)) for variant in EVERY
    ]


@pytest.fixture
def nothing_built(monkeypatch):
    """As in a process that has asked for no kernel yet, where Triton is installed."""
    monkeypatch.setattr(triton, "_installed", lambda: True)
    monkeypatch.setattr(triton, "_refusals", [])
    monkeypatch.setattr(triton, "_built", set())


def gradients_of(backend: str) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(12, 1, 8, generator=make), torch.randn(50, 8, generator=make)
    ids = torch.stack([torch.randperm(50, generator=make)[:4] for _ in range(12)])[:, None]
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with kernels.use_backend(backend):
        target = TopKTarget(ids, torch.full((12, 1, 4), 0.2).log())
        loss = fused_chunked_kd_loss(*leaves, target, chunk_size=5)
        loss.sum().backward()
    return [loss.detach(), *(x.grad for x in leaves)]


class BrokenSource:
    """Triton where a kernel's launcher finds no C compiler."""

    class read_rows:
        @staticmethod
        def warmup(*args, **kwargs):
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    write_rows = read_rows


def on_a_gpu(full: bool = False):
    """The backend that a chunk on a CUDA device gets; nothing is computed."""
    with FakeTensorMode():
        return kernels._backend(torch.empty(4, 8, device="cuda"), full)


def test_where_nothing_can_be_built_the_eager_twins_do_the_work(nothing_built, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, triton.SOURCE, BrokenSource)
    assert on_a_gpu() is triton and kernels.describe(torch.device("cuda")) == "triton"
    with caplog.at_level("WARNING"):
        got = gradients_of("triton")
    for value, want in zip(got, gradients_of("eager"), strict=True):
        torch.testing.assert_close(value, want)
    assert [record.getMessage() for record in caplog.records] == [
        "Triton cannot build the losses' kernels here, PyTorch's own operations take their place "
        "from here on: Failed to find C compiler."
    ]
    assert on_a_gpu() is eager and kernels.describe(torch.device("cuda")) == "eager"
    assert triton.refusal() == "Failed to find C compiler."


def test_a_variant_is_built_once(nothing_built, monkeypatch):
    """Each kind of logits is built before it runs, and run without asking again."""
    built, ran = [], []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def warmup(self, z, *args, **kwargs):
            built.append((self.name, z.dtype))

        def __getitem__(self, grid):
            return lambda *args, **kwargs: ran.append(self.name)

    class Source:
        read_rows, write_rows = Kernel("read_rows"), Kernel("write_rows")

    monkeypatch.setitem(sys.modules, triton.SOURCE, Source)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for rows in (5, 3):
            z = torch.zeros(rows, 64, dtype=dtype)
            m, sums = triton.max_and_sums(z, (1.0,), None)
            triton.to_gradient_(z, m, sums, (1.0,), None)
    kinds = itertools.product((torch.float32, torch.bfloat16), ("read_rows", "write_rows"))
    assert built == [(name, dtype) for dtype, name in kinds]
    assert ran == ["read_rows", "write_rows"] * 6
    assert triton.available()


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton finds a device here")
def test_triton_itself_without_a_device_is_refused(nothing_built, caplog):
    with caplog.at_level("WARNING"):
        got = gradients_of("triton")
    for value, want in zip(got, gradients_of("eager"), strict=True):
        torch.testing.assert_close(value, want)
    (record,) = caplog.records
    assert "Triton cannot build" in record.getMessage() and triton.refusal()
    assert not triton.available()


def write_table() -> None:
    with RESOURCES.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(measured(*variant) for variant in EVERY)


if __name__ == "__main__":
    {"--interpret": interpret, "--write": write_table}[sys.argv[1]]()
