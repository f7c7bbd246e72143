"""Measure shardkit against torch FSDP2 and DDP on this machine.

python benchmarks/run.py [case ...] [--rounds N] [--steps N] [--gb GB] [--device cpu|cuda]
    [--small] [--beside SRC] [--json FILE]
"""

import argparse
import json
import logging
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from cases import CASES, GROUPS, ONE_CARD
from checkpoint_case import CheckpointCase
from contenders import BESIDE_SOURCE
from ranks import RankError
from report import Report, environment
from rounds import Settings
from training_case import TrainingCase

_log = logging.getLogger(__name__)


def main() -> None:
    """Run the chosen cases; write tables to standard output, progress to standard error.

    The exit status is 1 if a case failed; the cases after it run in any case.
    """
    options = _parse(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    header = environment()
    _write("".join(f"- {key}: {value}\n" for key, value in header.items()))
    reports = {}
    for name in _without_card_cases(options):
        _log.info("case %s", name)
        begin = time.monotonic()
        reports[name] = _run(name, options)
        _write(reports[name].markdown())
        _log.info("case %s took %.0f s", name, time.monotonic() - begin)
    if options.json:
        found = {name: asdict(report) for name, report in reports.items()}
        text = json.dumps({"environment": header, "cases": found}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    sys.exit(1 if any(report.failures for report in reports.values()) else 0)


def _without_card_cases(options: argparse.Namespace) -> list[str]:
    """Return the cases that can run here; say why the others cannot."""
    cases: list[str] = options.cases
    if options.device == "cpu" or torch.cuda.is_available() or ONE_CARD.isdisjoint(cases):
        return cases
    skipped = [name for name in cases if name in ONE_CARD]
    _write(f"skipped: {', '.join(skipped)}: torch {torch.__version__} sees no CUDA device\n")
    return [name for name in cases if name not in ONE_CARD]


def _run(name: str, options: argparse.Namespace) -> Report:
    device_type = options.device or ("cuda" if name in ONE_CARD else "cpu")
    settings = Settings(
        num_rounds=options.rounds,
        num_steps=options.steps,
        device_type=device_type,
        state_gb=options.gb,
        world_size=2 if device_type == "cpu" else torch.cuda.device_count(),
        small=options.small,
    )
    case = CASES[name]
    try:
        if options.beside and isinstance(case, (TrainingCase, CheckpointCase)):
            return case.run_beside(settings)
        return case.run(settings)
    except RankError as error:
        return Report(CASES[name].summary, ("contender",), (), failures=(str(error),))


def _parse(arguments: list[str]) -> argparse.Namespace:
    listing = "\n".join(f"  {name:18} {case.summary}" for name, case in CASES.items())
    groups = "\n".join(f"  {name:18} {', '.join(cases)}" for name, cases in GROUPS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"cases:\n{listing}\n\ngroups of them:\n{groups}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="case", help="default: all but gpu")
    parser.add_argument("--rounds", type=int, default=7, help="turns per contender (7)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per turn (5)")
    parser.add_argument("--gb", type=float, default=1.0, help="state to be saved, in GB (1)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda for the cases of gpu, else cpu"
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny models in the cases of gpu, to see that they run"
    )
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="SRC",
        help="compare training cases and checkpoint with the shardkit of another commit, its "
        "folder src; others run as without it",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every measurement")
    options = parser.parse_args(arguments)
    if options.beside:
        os.environ[BESIDE_SOURCE] = str(options.beside.resolve(strict=True))  # ranks read it
    chosen = options.cases or [name for name in CASES if name not in ONE_CARD]
    options.cases = [name for case in chosen for name in GROUPS.get(case, [case])]
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    others = set(options.cases) - ONE_CARD
    if others and options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    if options.device == "cpu" and not options.small and len(others) < len(set(options.cases)):
        parser.error("the cases of gpu run on the CPU with --small only")
    return options


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
