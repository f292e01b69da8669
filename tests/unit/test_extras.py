"""What the package needs alone, what its extras bring, and what is said where one is missing."""

import email.parser
import importlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megatron_kd
from megatron_kd import extras

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
NO_PACKAGES_OF_OURS = {"docs", "dev", "all"}


def distribution_name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def brought(extra: str) -> set[str]:
    """Distributions that pyproject.toml's extra brings, through other extras too."""
    found = set()
    for line in PROJECT["optional-dependencies"][extra]:
        if ours := re.fullmatch(r"megatron-kd\[(.*)\]", line):
            found |= {name for inner in ours[1].split(",") for name in brought(inner)}
        else:
            found.add(distribution_name(line))
    return found


def test_the_table_of_extras_is_pyprojects():
    as_imported = {"pyyaml": "yaml", "lm-eval": "lm_eval"}
    declared = {
        extra: {as_imported.get(name, name.replace("-", "_")) for name in brought(extra)}
        for extra in PROJECT["optional-dependencies"].keys() - NO_PACKAGES_OF_OURS
    }
    assert {extra: set(packages) for extra, packages in extras.EXTRAS.items()} == declared
    assert brought("all") == brought("capture") | brought("tools") | brought("gguf")


@pytest.fixture
def without(monkeypatch):
    """A function that hides packages, as if they were not installed."""

    def hide(*packages: str) -> None:
        def wrapped(find_spec):
            def find(name, path=None, target=None):
                hidden = name.split(".")[0] in packages
                return None if hidden else find_spec(name, path, target)

            return find

        for finder in sys.meta_path:
            if type(finder).__module__ != extras.__name__:
                monkeypatch.setattr(finder, "find_spec", wrapped(finder.find_spec), raising=False)
        for name in list(sys.modules):
            if name.split(".")[0] in packages:
                monkeypatch.delitem(sys.modules, name)

    return hide


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("megatron_kd.cache.inspect", "rich", "cache"),
        ("megatron_kd.data.convert.distillkit", "yaml", "data"),
        ("megatron_kd.sections", "pydantic", "train"),
        ("megatron_kd.tools.console", "rich", "tools"),
        ("megatron_kd.models.gguf_tokenizer", "tokenizers", "models"),
        ("megatron_kd.teacher.capture.progress", "rich", "capture"),
    ],
)
def test_a_missing_package_is_one_sentence_that_names_the_extra(
    monkeypatch, without, module, package, extra
):
    without(package)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(extras.MissingExtra) as raised:
        importlib.import_module(module)
    said = f"{module} needs the package {package}, which is not installed: "
    assert str(raised.value) == f"{said}pip install 'megatron-kd[{extra}]'"
    assert raised.value.name == package


def test_the_extra_of_what_was_begun_is_named(monkeypatch, without):
    """Preparing data reads a model's tokenizer, which is code of models."""
    assert extras.remedy("transformers", ("data", "models")) == "pip install 'megatron-kd[data]'"
    assert extras.remedy("aiohttp", ("data", "teacher")) == "pip install 'megatron-kd[capture]'"
    assert extras.remedy("gguf", ("models",)) == "pip install 'megatron-kd[gguf]'"
    assert "scripts/setup.sh" in extras.remedy("megatron.core")
    assert extras.remedy("numpy") is None


def test_whoever_looks_whether_a_package_is_there_is_left_alone(without):
    without("gguf")
    assert importlib.util.find_spec("gguf") is None
    with pytest.raises(ModuleNotFoundError) as raised:
        import gguf  # noqa: F401
    assert not isinstance(raised.value, extras.MissingExtra)


def test_the_finder_is_there_once():
    importlib.reload(megatron_kd)
    assert [type(finder).__module__ for finder in sys.meta_path].count(extras.__name__) == 1


# What a library user does with the base install; then every module and every command's help.
IN_A_FRESH_ENVIRONMENT = """
import contextlib, importlib, io, json, pkgutil, sys
import numpy as np, torch
import megatron_kd
from megatron_kd import cli, extras
from megatron_kd.cache import CacheReader, CacheSpec, CacheWriter
from megatron_kd.losses import Divergence, TopKTarget, fused_chunked_kd_loss

report = {"file": megatron_kd.__file__}
ids = torch.arange(6).repeat(2, 1, 1)
target = TopKTarget(ids, torch.log_softmax(torch.randn(2, 1, 6), -1) - 0.1)
weight = torch.randn(16, 8, requires_grad=True)
loss = fused_chunked_kd_loss(torch.randn(2, 1, 8), weight, target, divergence=Divergence())
loss.sum().backward()
report["loss"] = bool(torch.isfinite(loss).all() and weight.grad.abs().sum() > 0)

spec = CacheSpec(vocab_size=16, topk=3, teacher="t", tokenizer="u")
with CacheWriter(sys.argv[1], spec) as writer:
    rows = np.log(np.tile([0.5, 0.3, 0.1], (3, 1)))
    writer.append(np.arange(4), [1, 1, 1, 0], np.tile(np.arange(3), (3, 1)), rows)
report["cache"] = float(CacheReader(sys.argv[1])[0].mass[0])

report["missing"], report["broken"] = {}, {}
for found in pkgutil.walk_packages(megatron_kd.__path__, "megatron_kd.", onerror=print):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except extras.MissingExtra as error:
            report["missing"][found.name] = str(error)
        except Exception as error:
            report["broken"][found.name] = f"{type(error).__name__}: {error}"
report["commands"] = {}
for name in (*cli.COMMANDS, *(f"dev {name}" for name in cli.DEVELOPER_COMMANDS)):
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
        try:
            status = cli.main([*name.split(), "--help"])
        except SystemExit as stop:
            status = stop.code
    report["commands"][name] = [status, shown.getvalue()]
print(json.dumps(report))
"""


def built_wheel(folder: Path) -> Path:
    """A wheel of what is tracked, or would be, as `pip wheel .` makes it."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in names.stdout.splitlines():
        if name.startswith(("megatron_kd/", "recipes/", "configs/")) or "/" not in name:
            if (REPOSITORY / name).is_file():
                (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, folder / "source" / name)
    build = "wheel --no-deps --no-index --no-build-isolation --wheel-dir".split()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *build, folder, folder / "source"], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def required(requirements: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Installed distributions that a list of requirements brings, and what those require."""
    found, wanted = {}, list(requirements)
    while wanted:
        requirement = Requirement(wanted.pop())
        name = distribution_name(requirement.name)
        if name in found or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            continue
        found[name] = importlib.metadata.distribution(name)
        wanted += found[name].requires or []
    return found


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """What `pip install WHEEL` gives in a clean environment, without an index: the wheel, and links
    to what its metadata requires, as it is installed here."""
    folder = tmp_path_factory.mktemp("fresh")
    wheel = built_wheel(folder)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("METADATA"))
        metadata = email.parser.Parser().parsestr(archive.read(name).decode())
        venv.create(folder / "environment", with_pip=False)
        (packages,) = (folder / "environment").glob("lib/python*/site-packages")
        archive.extractall(packages)
    base = required(metadata.get_all("Requires-Dist"))
    for distribution in base.values():
        tops = {file.parts[0] for file in distribution.files if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    done = subprocess.run(
        [folder / "environment/bin/python", "-I", "-c", IN_A_FRESH_ENVIRONMENT, folder / "cache"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["file"].startswith(str(packages))
    return base, report


@pytest.mark.extended
def test_the_wheel_alone_gives_losses_and_caches(fresh):
    base, report = fresh
    assert {"torch", "numpy", "safetensors", "xxhash"} <= base.keys()
    assert not base.keys() & {"transformers", "pydantic", "rich", "pyarrow", "matplotlib"}
    assert report["loss"] and report["cache"] == pytest.approx(0.9, abs=0.01)
    missing = report["missing"]
    assert not [n for n in missing if n.startswith("megatron_kd.losses")]
    without_extra = {"format", "reader", "writer", "mixing", "storage", "codecs.compact"}
    assert not missing.keys() & {f"megatron_kd.cache.{name}" for name in without_extra}


@pytest.mark.extended
def test_everything_else_names_its_extra_in_one_sentence(fresh):
    _, report = fresh
    # Triton comes with CUDA builds of PyTorch; the loss asks for it before it imports its kernels.
    broken = {n: e for n, e in report["broken"].items() if "'triton'" not in e}
    assert not broken
    named = re.compile(r"\S+ needs the package \S+, which is not installed: .+")
    for said in report["missing"].values():
        assert named.fullmatch(said), said
    assert report["missing"]["megatron_kd.cache.inspect"].endswith("'megatron-kd[cache]'")
    for command, (status, shown) in report["commands"].items():
        if status != 0:
            assert status == 1 and shown.count("\n") == 1, (command, shown)
            assert re.search(r"pip install 'megatron-kd\[\w+\]'|install Megatron-Bridge", shown)
    assert report["commands"]["verify"][1].strip().endswith("pip install 'megatron-kd[cache]'")
