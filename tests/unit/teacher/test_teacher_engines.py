"""An engine that comes from outside the package: an entry in ENGINES, and nothing else."""

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass, fields

import numpy as np
import pytest
from prepared import command, shards_of
from tiny_teacher import VOCAB

from megatron_kd.cache import CacheReader
from megatron_kd.cli import main
from megatron_kd.host.megatron_engine.engine import MegatronOptions
from megatron_kd.teacher.capture.job import CaptureJob
from megatron_kd.teacher.capture.shards import capture, recapture
from megatron_kd.teacher.capture.workers import Worker
from megatron_kd.teacher.engines import ENGINES, engine_class
from megatron_kd.teacher.engines.base import (
    EngineError,
    EngineOptions,
    TeacherDescription,
    TeacherEngine,
    TeacherRows,
    option,
)
from megatron_kd.teacher.engines.vllm import VllmOptions


@dataclass(frozen=True, kw_only=True)
class CountingOptions(EngineOptions):
    stride: int = option(1, "from one id to the next", shapes_rows=True, minimum=1)
    manner: str | None = option(None, "how it counts", choices=("aloud",))
    listener: tuple[str, ...] = option((), "who is told", metavar="NAME")
    backwards: bool = option(False, "count down, 100 % of it", shapes_rows=True)


class CountingEngine(TeacherEngine):
    """Row t gives the ids after tokens[t], each a stride on, with falling probabilities."""

    Options = CountingOptions

    @classmethod
    def describe(cls, teacher, options):
        return TeacherDescription(version="counting 1", fingerprint={"name": teacher})

    def __init__(self, teacher, request, options):
        self.request, self.options = request, options

    def stream(self, documents):
        steps = (1 + np.arange(self.request.topk)) * self.options.stride
        steps = -steps if self.options.backwards else steps
        logprobs = np.log(0.5) * (1 + np.arange(self.request.topk, dtype=np.float32))
        for index, document in enumerate(documents):
            ids = (document.tokens[document.rows, None] + steps) % self.request.vocab_size
            yield index, TeacherRows(ids.astype(np.int32), np.tile(logprobs, (len(ids), 1)))

    def close(self):
        pass


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setitem(ENGINES, "counting", CountingEngine)


def arguments(data, output, *more):
    common = ["--data", str(data), "--teacher", "abacus", "--output", str(output)]
    kept = ["--topk", "5", "--shard-positions", "70", "--codec", "fp16", "--split", "train"]
    return ["capture", *common, *kept, "--engine", "counting", *more]


def ids_of_first_sample(cache):
    sample = CacheReader(cache / "train")[0]
    tokens = sample.tokens[sample.loss_mask]
    return (sample.topk_ids[sample.loss_mask] - tokens[:, None]) % VOCAB


def test_its_options_are_in_the_help(counting, capsys):
    with pytest.raises(SystemExit) as done:
        main(["capture", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0
    assert "--stride STRIDE counting: from one id to the next (default 1)" in words
    assert "--listener NAME counting: who is told" in words
    assert "--backwards counting: count down, 100 % of it" in words
    assert "counting," in words or "counting}" in words  # among the choices of --engine


def test_it_captures_and_what_shapes_rows_is_recorded(counting, data, tmp_path):
    more = ["--stride", "3", "--listener", "a", "--listener", "b"]
    assert main(arguments(data, tmp_path / "cache", *more)) == 0
    assert (ids_of_first_sample(tmp_path / "cache") == [3, 6, 9, 12, 15]).all()
    manifest = CacheReader(tmp_path / "cache" / "train").manifest
    assert manifest["engine"] == {"name": "counting", "version": "counting 1"}
    assert manifest["teacher"] == {"name": "abacus"}
    assert manifest["parameters"] == {"shard_positions": 70, "stride": 3}
    assert manifest["origin"]["options"] == {"stride": 3, "listener": ["a", "b"]}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["--stride", "3"], ["--stride", "4"]),
        (["--stride", "3"], []),
        ([], ["--stride", "3"]),
        ([], ["--backwards"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("complete", [False, True], ids=["begun", "complete"])
def test_another_value_is_refused_on_resume(
    first, second, complete, counting, data, tmp_path, capsys
):
    worker = [] if complete else ["--worker", "0/2"]
    assert main(arguments(data, tmp_path / "cache", *first, *worker)) == 0
    before = shards_of(tmp_path / "cache")
    assert main(arguments(data, tmp_path / "cache", *second)) == 1
    words = capsys.readouterr().err
    assert "use the same settings, or another directory" in words
    assert (second or first)[0].removeprefix("--") in words
    assert shards_of(tmp_path / "cache") == before
    assert main(arguments(data, tmp_path / "cache", *first, "--listener", "a")) == 0
    assert len(CacheReader(tmp_path / "cache" / "train")) == 12


@pytest.mark.parametrize("unasked", [False, "COUNTING_KEY"])
def test_an_option_that_is_not_taken_unasked(unasked, counting, data, tmp_path, monkeypatch):
    """By the option's mark, whatever it is called: a manifest must not be able to ask for it."""
    marked = next(f for f in fields(CountingOptions) if f.name == "listener")
    monkeypatch.setattr(marked, "metadata", {**marked.metadata, "unasked": unasked})
    monkeypatch.setenv("COUNTING_KEY", "secret")
    assert main(arguments(data, tmp_path / "cache", "--listener", "a")) == 0
    with pytest.raises(EngineError, match="--listener.* unasked; give its .* command again"):
        recapture(tmp_path / "cache" / "train", [1])
    monkeypatch.delenv("COUNTING_KEY")
    if unasked:  # nothing that the listener could be told
        recapture(tmp_path / "cache" / "train", [1])


@pytest.mark.parametrize("options", [VllmOptions, MegatronOptions])
def test_a_split_of_the_layers_is_recorded_where_there_is_one(options):
    """Other partial sums round otherwise. At the default a manifest stays as it was."""
    assert "tensor_parallel" not in options().recorded()
    assert options(tensor_parallel=2).recorded()["tensor_parallel"] == 2


def test_shards_are_made_again_under_the_recorded_options(counting, data, tmp_path):
    assert main(arguments(data, tmp_path / "cache", "--stride", "3", "--listener", "a")) == 0
    before = shards_of(tmp_path / "cache")
    (tmp_path / "cache" / "train" / "shard-000001.safetensors").write_bytes(b"gone")
    manifest = recapture(tmp_path / "cache" / "train", [1])
    assert shards_of(tmp_path / "cache") == before
    assert manifest["origin"]["options"] == {"stride": 3, "listener": ["a"]}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--dtype", "float32"], "dtype: not an option of the counting engine"),
        (["--stride", "0"], "stride must be at least 1"),
        (["--manner", "silently"], "manner must be one of"),
    ],
    ids=lambda value: str(value),
)
def test_options_are_checked_by_the_engine_that_runs(more, words, counting, data, tmp_path, capsys):
    assert main(arguments(data, tmp_path / "cache", *more)) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_its_options_are_refused_to_other_engines(counting, data, teacher_dir, tmp_path, capsys):
    assert main(command(data, teacher_dir, tmp_path / "cache", "--stride", "2")) == 1
    assert "stride: not an option of the transformers engine" in capsys.readouterr().err


def test_a_session_surrounds_the_capture_and_decides_who_runs_it(
    counting, data, tmp_path, monkeypatch
):
    """As an engine over several ranks does it: all of them come here, one captures."""
    seen = []

    @classmethod
    @contextlib.contextmanager
    def session(cls, options):
        seen.append(options.stride)
        yield leads
        seen.append("end")

    monkeypatch.setattr(CountingEngine, "session", session)
    monkeypatch.setattr(CountingEngine, "spans_ranks", True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for leads in (False, True):
        assert main(arguments(data, tmp_path / "cache", "--stride", "2")) == 0
        assert (tmp_path / "cache" / "train" / "manifest.json").exists() is leads
    assert seen == [2, "end", 2, "end"]


def test_an_engine_named_by_module_and_class(monkeypatch, tmp_path):
    (tmp_path / "abacus_engine.py").write_text("class Abacus:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ENGINES, "abacus", "abacus_engine:Abacus")
    assert engine_class("abacus").__name__ == "Abacus"
    with pytest.raises(EngineError, match="no teacher engine 'abakus'; there are abacus, "):
        engine_class("abakus")


def test_a_missing_package_is_named_and_hides_no_other_engine(data, tmp_path, monkeypatch, capsys):
    """Be it missing where the engine's module begins, or only once it is used."""
    (tmp_path / "early_engine.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ENGINES, "early", "early_engine:Engine")

    class Late(CountingEngine):
        @classmethod
        def describe(cls, teacher, options):
            import no_such_package  # noqa: F401

    class Later(CountingEngine):
        def __init__(self, *arguments):
            import no_such_package  # noqa: F401

    class InSession(CountingEngine):
        @classmethod
        def session(cls, options):
            import no_such_package  # noqa: F401

    engines = {"late": Late, "later": Later, "in-session": InSession}
    for name, engine in engines.items():
        monkeypatch.setitem(ENGINES, name, engine)
    for name in ("early", *engines):
        assert main([*arguments(data, tmp_path / "cache")[:-1], name]) == 1
        words = capsys.readouterr().err
        assert f"the {name} engine needs the package no_such_package" in words


def test_a_package_missing_elsewhere_is_not_the_engines(counting, data, tmp_path, monkeypatch):
    """What encodes a cache is no part of the teacher."""

    def append(*arguments, **options):
        raise ModuleNotFoundError("No module named 'no_such_package'", name="no_such_package")

    monkeypatch.setattr("megatron_kd.cache.writer.ShardWriter.append", append)
    with pytest.raises(ModuleNotFoundError):
        main(arguments(data, tmp_path / "cache"))


def test_an_option_means_one_type(monkeypatch, capsys):
    @dataclass(frozen=True, kw_only=True)
    class Options(EngineOptions):
        stride: float = option(1.0, "a share of a step")

    class Other(CountingEngine):
        pass

    Other.Options = Options
    monkeypatch.setitem(ENGINES, "counting", CountingEngine)
    monkeypatch.setitem(ENGINES, "other", Other)
    assert main(["capture", "--help"]) == 1
    assert "the engines counting, other differ in the type of stride" in capsys.readouterr().err


def test_an_option_that_says_nothing_of_itself_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Options(EngineOptions):
        stride: int = 1

    with pytest.raises(EngineError, match="stride must be declared with option"):
        Options()


def test_the_command_line_is_listed_without_what_engines_run_on():
    """`capture --help` answers at once, whatever is installed."""
    script = (
        "import sys; from megatron_kd import cli\n"
        "try: cli.main(['capture', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'vllm', 'megatron', 'aiohttp'} & set(sys.modules)\n"
        "print('heavy', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "--pipeline-parallel" in done.stdout and "heavy []" in done.stdout, done.stderr


class TestCachesFromBeforeOptionsWereRecorded:
    """The first releases recorded dtype and batch_tokens; what else was given stood in the job."""

    @pytest.fixture
    def begun(self, data, tmp_path, monkeypatch):
        """A directory as those releases began it with `--stride 3`."""
        monkeypatch.setitem(ENGINES, "counting", CountingEngine)
        monkeypatch.setattr(CountingOptions, "recorded", lambda options: {})
        job = CaptureJob(
            data=str(data / "train"),
            teacher="abacus",
            engine="counting",
            options={"stride": 3},
            topk=5,
            shard_positions=70,
            codec="fp16",
        )
        capture({"train": (job, tmp_path / "cache" / "train")}, Worker(0, 2))
        spec = json.loads((tmp_path / "cache" / "train" / "spec.json").read_text())
        assert spec["parameters"] == {"shard_positions": 70}
        monkeypatch.undo()
        monkeypatch.setitem(ENGINES, "counting", CountingEngine)
        return tmp_path / "cache"

    def test_they_resume_by_the_same_command(self, begun, data):
        before = {path: path.read_bytes() for path in begun.rglob("shard-*.safetensors")}
        assert main(arguments(data, begun, "--stride", "3")) == 0
        after = {path: path.read_bytes() for path in begun.rglob("shard-*.safetensors")}
        assert len(after) > len(before) and after == {**after, **before}
        assert CacheReader(begun / "train").manifest["parameters"] == {"shard_positions": 70}
        assert main(["verify", str(begun), "--decode"]) == 0
        assert main(arguments(data, begun, "--stride", "3")) == 0  # complete now
        assert main(arguments(data, begun, "--stride", "2")) == 1

    def test_another_value_than_the_job_had_is_refused(self, begun, data, capsys):
        for other in ([], ["--stride", "2"]):
            assert main(arguments(data, begun, *other)) == 1
            words = capsys.readouterr().err
            assert "'stride': (3, " in words and "use the same settings" in words

    def test_their_shards_are_made_again(self, begun, data):
        assert main(arguments(data, begun, "--stride", "3")) == 0
        before = shards_of(begun)
        (begun / "train" / "shard-000000.safetensors").unlink()
        recapture(begun / "train")
        assert shards_of(begun) == before
