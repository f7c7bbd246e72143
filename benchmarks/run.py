"""Measure shardkit against torch FSDP2 and DDP on this machine.

python benchmarks/run.py [case ...] [--rounds N] [--steps N] [--gb GB] [--device cpu|cuda]
    [--json FILE]
"""

import argparse
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from cases import CASES
from report import environment
from rounds import Settings

_log = logging.getLogger(__name__)


def main() -> None:
    """Run the chosen cases; write tables to standard output, progress to standard error."""
    options = _parse(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = Settings(
        num_rounds=options.rounds,
        num_steps=options.steps,
        device_type=options.device,
        state_gb=options.gb,
        world_size=2 if options.device == "cpu" else torch.cuda.device_count(),
    )
    header = environment()
    _write("".join(f"- {key}: {value}\n" for key, value in header.items()))
    reports = {}
    for name in options.cases:
        _log.info("case %s", name)
        reports[name] = CASES[name].run(settings)
        _write(reports[name].markdown())
    if options.json:
        found = {name: asdict(report) for name, report in reports.items()}
        text = json.dumps({"environment": header, "cases": found}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


def _parse(arguments: list[str]) -> argparse.Namespace:
    listing = "\n".join(f"  {name:14} {case.summary}" for name, case in CASES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"cases:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="case", help="default: all")
    parser.add_argument("--rounds", type=int, default=7, help="turns per contender (7)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per turn (5)")
    parser.add_argument("--gb", type=float, default=1.0, help="state to be saved, in GB (1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every measurement")
    options = parser.parse_args(arguments)
    options.cases = options.cases or list(CASES)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    return options


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
