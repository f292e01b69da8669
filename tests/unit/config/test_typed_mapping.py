"""Plain mappings against the shapes the host's dataclasses use."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch

from megatron_kd.typed_mapping import ConfigError, update


class Color(enum.Enum):
    red = 1
    blue = 2


@dataclass
class Inner:
    size: int = 1
    names: list[str] = field(default_factory=list)


@dataclass
class Host:
    count: int | None = None
    rate: float = 0.0
    dtype: torch.dtype = torch.float32
    color: Color = Color.red
    level: Literal[0, 1, 2] = 0
    spec: Callable | None = None
    inner: Inner = field(default_factory=Inner)
    other: Inner | None = None
    either: Inner | str | None = None
    _private: int = 0


def updated(**mapping):
    host = Host()
    update(host, mapping, "bridge")
    return host


def test_values_arrive_in_the_types_the_host_wants():
    host = updated(
        count=3,
        rate="1e-4",
        dtype="torch.bfloat16",
        color="blue",
        level=2,
        spec="os.path.join",
        inner={"size": 5, "names": ["a"]},
        other={"size": 7},
        either="bf16_mixed",
    )
    assert (host.count, host.rate, host.dtype, host.color) == (3, 1e-4, torch.bfloat16, Color.blue)
    assert host.spec is __import__("os").path.join
    assert (host.inner.size, host.inner.names, host.other.size) == (5, ["a"], 7)
    assert host.either == "bf16_mixed"


def test_target_builds_the_named_class():
    host = updated(either={"_target_": f"{__name__}.Inner", "size": 9})
    assert host.either == Inner(size=9)


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"cuont": 1}, ["bridge.cuont", "did you mean bridge.count"]),
        ({"inner": {"sise": 1}}, ["bridge.inner.sise", "did you mean bridge.inner.size"]),
        ({"count": "three"}, ["bridge.count", "an integer", "'three'"]),
        ({"count": True}, ["bridge.count", "an integer"]),
        ({"rate": [1]}, ["bridge.rate", "a number"]),
        ({"dtype": "float33"}, ["bridge.dtype", "bfloat16"]),
        ({"color": "green"}, ["bridge.color", "red, blue"]),
        ({"level": 3}, ["bridge.level", "0, 1, 2"]),
        ({"spec": "os.path.jion"}, ["bridge.spec", "cannot be imported"]),
        ({"inner": 3}, ["bridge.inner", "mapping"]),
        ({"inner": {"names": "ab"}}, ["bridge.inner.names", "a list"]),
        ({"_private": 3}, ["bridge._private"]),
    ],
)
def test_wrong_mappings_name_the_key(mapping, expected):
    with pytest.raises(ConfigError) as error:
        updated(**mapping)
    for part in expected:
        assert part in str(error.value)


def test_null_is_for_fields_that_may_be_none():
    assert updated(count=None, spec=None).count is None
    with pytest.raises(ConfigError, match="bridge.rate must be a number, not None"):
        updated(rate=None)
