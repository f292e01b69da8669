"""An untested host gets a warning, one without the seams a refusal, and what is installed here
neither.
"""

import json
import subprocess

import pytest
from launch import REPOSITORY, environment, host_python

# One process asks all: importing the host takes longer than the answers.
ASK = """
import importlib.metadata, json, logging
from megatron_kd.host.cpu import backend
backend.activate()
from megatron_kd.host.versions import features as host_version
heard = []
handler = logging.Handler()
handler.emit = lambda record: heard.append(record.getMessage())
host_version.logger.addHandler(handler)
answers = {}
def ask(name):
    heard.clear()
    try:
        host_version.check()
        answers[name] = list(heard)
    except RuntimeError as error:
        answers[name] = str(error)
ask("installed")
real = importlib.metadata.version
importlib.metadata.version = lambda name: "9.9.9" if name.startswith("megatron-") else real(name)
ask("newer")
host_version.SEAMS += ("megatron.core.utils.gone", "megatron.bridge.nowhere.Class.method")
ask("without seams")
print("ANSWERS " + json.dumps(answers))
"""


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
