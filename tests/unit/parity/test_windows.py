"""The windows that a configuration asks for, and the settings that give them on each host."""

from types import SimpleNamespace

import pytest

from megatron_kd.host import versions
from megatron_kd.host.versions import v0_3, v0_6, windows
from megatron_kd.typed_mapping import ConfigError

WINDOWED, WHOLE = "sliding_attention", "full_attention"


def config(**settings):
    return SimpleNamespace(num_hidden_layers=4, **settings)


def provider(**settings):
    return SimpleNamespace(**({"window_size": "unset", "cp_comm_type": None} | settings))


def corrected(configuration, **settings):
    own = provider(**settings)
    windows.correct(own, configuration)
    return own


def test_layers_say_which_have_a_window():
    kinds = [WINDOWED, WHOLE, WINDOWED, "linear_attention"]
    found = windows.windows(config(sliding_window=9, layer_types=kinds))
    assert found == [9, None, 9, None]


def test_without_kinds_of_layers_every_layer_has_it():
    assert windows.windows(config(sliding_window=9)) == [9] * 4
    assert windows.windows(config(sliding_window=None)) == [None] * 4
    assert windows.windows(config()) == [None] * 4


def test_a_layer_of_a_kind_that_the_host_does_not_know_is_refused():
    kinds = [WHOLE, "chunked_attention", WHOLE, WHOLE]
    with pytest.raises(ConfigError, match="layers of type chunked_attention, which the host"):
        windows.windows(config(sliding_window=9, layer_types=kinds))


def test_the_hosts_window_holds_the_keys_before_the_query():
    own = corrected(config(sliding_window=9))
    assert own.window_size == (8, 0)
    assert own.window_attn_skip_freq is None
    assert own.cp_comm_type == "a2a"


def test_only_the_named_layers_get_it():
    kinds = [WHOLE, WHOLE, WINDOWED, WHOLE]
    own = corrected(config(sliding_window=9, layer_types=kinds), cp_comm_type="all_gather")
    assert own.window_size == (8, 0)
    assert own.window_attn_skip_freq == [0, 0, 1, 0]
    assert own.cp_comm_type == "all_gather"


def test_a_window_that_no_layer_uses_is_taken_away():
    own = corrected(config(sliding_window=9, layer_types=[WHOLE] * 4), window_attn_skip_freq=2)
    assert own.window_size is None


@pytest.mark.parametrize(("host", "expected"), [(v0_3.HOST, 8), (v0_6.HOST, 9)])
def test_gemma3_counts_its_window_as_the_host_does(monkeypatch, host, expected):
    monkeypatch.setattr(versions, "current", lambda: host)
    kinds = [WINDOWED, WINDOWED, WINDOWED, WHOLE]
    asked = config(sliding_window=9, layer_types=kinds)
    own = corrected(asked, interleaved_attn_pattern=(5, 1))
    assert own.window_size == expected
    assert not hasattr(own, "window_attn_skip_freq")


def test_gemma2_chooses_its_layers_itself():
    kinds = [WINDOWED, WHOLE] * 2
    own = corrected(config(sliding_window=9, layer_types=kinds), attn_logit_softcapping=50.0)
    assert own.window_size == (8, 0)
    assert not hasattr(own, "window_attn_skip_freq")
