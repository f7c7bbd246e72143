"""What users choose of the watch over ranks."""

from __future__ import annotations

import pytest

from shardkit import StateError, set_watch
from shardkit._settings import WatchSettings, watch_settings


@pytest.fixture(autouse=True)
def as_before() -> object:
    before = (watch_settings.ask_after_s, watch_settings.compare_values)
    yield
    watch_settings.ask_after_s, watch_settings.compare_values = before


def test_what_is_not_named_stays() -> None:
    set_watch(ask_after_s=3)
    assert watch_settings.ask_after_s == 3.0
    assert watch_settings.compare_values
    set_watch(compare_values=False)
    assert watch_settings.ask_after_s == 3.0
    assert not watch_settings.compare_values


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_times_are_positive(seconds: float) -> None:
    with pytest.raises(StateError, match="positive number of seconds"):
        set_watch(ask_after_s=seconds)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_ASK_AFTER_S", "2.5")
    monkeypatch.setenv("SHARDKIT_COMPARE_VALUES", "0")
    assert WatchSettings.of_environment() == WatchSettings(2.5, compare_values=False)
