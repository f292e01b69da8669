"""The description of the installed host is chosen and applied; an untested host gets a warning, one
without the seams a refusal.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from launch import REPOSITORY, answers_of, environment, host_python

from megatron_kd.host import versions

# One process asks all: importing the host takes longer than the answers.
ASK = """
import importlib.metadata, json, logging
from megatron_kd.host import versions
from megatron_kd.host.cpu import backend
backend.activate()
heard = []
handler = logging.Handler()
handler.emit = lambda record: heard.append(record.getMessage())
versions.logger.addHandler(handler)
answers = {}
def ask(name):
    heard.clear()
    try:
        versions.check()
        answers[name] = list(heard)
    except RuntimeError as error:
        answers[name] = str(error)
ask("installed")
import megatron.core.transformer.moe.router as router
import megatron.bridge.data.samplers as samplers
replaceable = lambda: [router.MoEAuxLossAutoScaler, samplers.MegatronPretrainingBatchSampler]
before = replaceable()
versions.apply_patches()
once = replaceable()
versions.apply_patches()
answers["patched"] = [a is not b for a, b in zip(before, once)]
answers["patched twice"] = [a is not b for a, b in zip(once, replaceable())]
real = importlib.metadata.version
importlib.metadata.version = lambda name: "9.9.9" if name.startswith("megatron-") else real(name)
ask("newer")
versions.SEAMS += ("megatron.core.utils.gone", "megatron.bridge.nowhere.Class.method")
ask("without seams")
print("ANSWERS " + json.dumps(answers))
"""
STACK = tuple(map(int, version("megatron-bridge").split(".")[:2]))


@pytest.fixture(scope="module")
def answers() -> dict:
    done = subprocess.run(
        [host_python(), "-c", ASK],
        env=environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    return json.loads(line[8:])


def test_the_installed_host_is_tested(answers):
    assert answers["installed"] == []


def test_a_newer_host_is_warned_of_and_accepted(answers):
    (warning,) = answers["newer"]
    assert "megatron-bridge 9.9.9, megatron-core 9.9.9 is untested" in warning
    assert "megatron-bridge 0.3.1 with megatron-core 0.16.1" in warning
    assert "megatron-bridge 0.6.2 with megatron-core 0.19.2" in warning


def test_a_host_without_the_seams_is_refused(answers):
    refusal = answers["without seams"]
    assert "no megatron.core.utils.gone, megatron.bridge.nowhere.Class.method" in refusal
    assert "Install megatron-bridge 0.3.1 with megatron-core 0.16.1 or" in refusal


def test_each_stack_has_a_description_and_the_installed_one_is_its_own():
    lists = (REPOSITORY / "scripts" / "requirements").glob("stack-*-nodeps.txt")
    stacks = {}
    for path in map(Path, lists):
        pinned = dict(re.findall(r"^(megatron-(?:core|bridge))==(.+)$", path.read_text(), re.M))
        major, minor = re.search(r"stack-(\d+)\.(\d+)-", path.name).groups()
        stacks[int(major), int(minor)] = pinned
    assert stacks == {
        key: {"megatron-core": host.core, "megatron-bridge": host.bridge}
        for key, host in versions.HOSTS.items()
    }
    assert versions.current() is versions.HOSTS[STACK]


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        ("0.3.0", "0.3.1"),
        ("0.5.1", "0.3.1"),
        ("0.6.0rc1", "0.6.2"),
        ("1.0", "0.6.2"),
        ("0.1", "0.3.1"),
    ],
)
def test_an_untested_version_gets_the_nearest_older_description(installed, chosen):
    assert versions.nearest(installed).bridge == chosen


def test_only_what_this_host_does_wrong_is_replaced_and_only_once(answers):
    scales_router_losses, shuffles_in_the_sampler = STACK < (0, 6), STACK >= (0, 6)
    assert answers["patched"] == [scales_router_losses, shuffles_in_the_sampler]
    assert answers["patched twice"] == [False, False]


def test_what_the_host_itself_demands_is_compared_with_what_is_installed(monkeypatch):
    demands = ["transformers<5", 'transformers>9; extra == "x"', "torch"]
    monkeypatch.setattr(versions.importlib.metadata, "requires", lambda _: demands)
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda _: "4.57.6")
    assert versions.unmet_requirement("transformers") is None
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda _: "5.0.1")
    assert versions.unmet_requirement("transformers") == "transformers<5"


def test_a_description_is_chosen_without_torch_and_without_the_host():
    """The CPU backend and the doctor ask before either is imported."""
    code = "import sys; from megatron_kd.host import versions; versions.current(); "
    code += "print(sorted({'torch', 'megatron.core', 'megatron.bridge'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.extended
def test_losses_that_come_with_the_host_agree_with_ours():
    """Loss and gradients, before the benchmark times them."""
    cached, modelopt = answers_of(
        "peers_agree.py", asked=["megatron_lm_cached", "modelopt_logits_kl"]
    )
    assert modelopt is None
    assert cached is None if STACK >= (0, 6) else "megatron-core 0.19 has it" in cached
