"""The cases of one card, with tiny sizes on the CPU: ``pytest -o pythonpath=benchmarks ...``."""

import sys
from dataclasses import replace

import pytest
import torch

import run
from cases import CASES
from contenders import FSDP2, PLAIN, SHARDKIT
from one_card_cases import FakeCase, Host, Steps, disagreements, fake_verdicts
from report import Spread
from rounds import Settings

TINY = Settings(num_rounds=1, num_steps=1, device_type="cpu", world_size=1, small=True)


def test_a_world_of_one_rank_is_measured() -> None:
    """Both contenders get a row, and have the same losses."""
    report = CASES["gpu-fp32"].run(TINY)
    assert [row[0] for row in report.rows] == [FSDP2, SHARDKIT]
    assert not report.failures


def test_a_fake_group_is_measured() -> None:
    """Every cell of FSDP2's row is there; a note says that shardkit is left out on the CPU."""
    case = CASES["gpu-fake"]
    assert isinstance(case, FakeCase)
    report = replace(case, sizes=(8,)).run(TINY)
    assert [row[:2] for row in report.rows] == [["8", FSDP2]]
    assert len(report.rows[0]) == len(report.columns)
    assert "left out" in report.notes[0]


def test_without_a_card_the_cases_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says why the cases are skipped, and succeeds."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run.py", "gpu"])
    with pytest.raises(SystemExit) as end:
        run.main()
    assert end.value.code == 0
    assert "skipped: gpu-bf16, gpu-bf16-compiled" in capsys.readouterr().out


def test_targets_are_judged_from_the_figures() -> None:
    """Host time is judged as a whole, 0.6, and without 100 of the layers and 100 of copies."""
    steps = Steps({FSDP2: [1.0, 1.0], SHARDKIT: [0.9, 0.94]}, {FSDP2: 100, SHARDKIT: 91})
    issue = {FSDP2: [1000.0], SHARDKIT: [600.0], PLAIN: [100.0]}
    verdicts = fake_verdicts(64, steps, Host(1, issue, copies=[100.0]))
    assert [verdict.partition("Measured: ")[2] for verdict in verdicts] == [
        "0.920, met (0.900..0.940)",
        "0.910, not met",
        "0.600, not met (0.600..0.600)",
        "0.500, met (0.500..0.500)",
    ]


def test_losses_that_differ_are_found() -> None:
    """Losses that are NaN are found as well."""
    losses = {"a": [2.0, 1.0], "b": [2.01, 1.0], "c": [2.0, 1.1], "d": [float("nan"), 1.0]}
    assert [text.split()[2] for text in disagreements(losses)] == ["c", "d"]


def test_a_ratio_of_medians_has_the_range_of_the_rounds() -> None:
    """One slow round shows in the range only."""
    assert Spread.of_medians([1.0, 2.0, 9.0], [2.0, 4.0, 4.0]) == Spread(0.5, 0.5, 2.25)
