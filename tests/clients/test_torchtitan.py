"""torchtitan's Trainer, unchanged, with shardkit in FSDP2's place: the same numbers."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import titan_ranks
from titan_ranks import SHARDERS, Case, Files, Trained

if typing.TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    import workers

pytestmark = pytest.mark.clients

CASES = {
    "fp32": Case(),
    "fp32, 4 ranks": Case(ranks=4),
    "bf16": Case(training={"mixed_precision_param": "bfloat16"}, tolerance=2e-3),
    "accumulation": Case(training={"global_batch_size": 16}),
    "selective recomputation": Case(recompute="selective"),
    "full recomputation": Case(recompute="full"),
    "reshard always": Case(parallelism={"fsdp_reshard_after_forward": "always"}),
    "reshard never": Case(parallelism={"fsdp_reshard_after_forward": "never"}),
    "tied embeddings": Case(is_tied=True),
    "loss in chunks": Case(is_chunked=True),
    "loss in chunks, tied": Case(is_chunked=True, is_tied=True),
    "loss in chunks, accumulation": Case(is_chunked=True, training={"global_batch_size": 16}),
    "foreach": Case(optimizer="foreach"),
    "fused": Case(optimizer="fused"),
    "hybrid 2x1": Case(parallelism={"data_parallel_replicate_degree": 2}),
    "hybrid 2x2": Case(ranks=4, parallelism={"data_parallel_replicate_degree": 2}),
    "tensor parallel": Case(
        ranks=4, parallelism={"tensor_parallel_degree": 2, "enable_sequence_parallel": False}
    ),
    "tensor and sequence parallel": Case(ranks=4, parallelism={"tensor_parallel_degree": 2}),
    "tensor parallel alone": Case(parallelism={"tensor_parallel_degree": 2}),
    "full_dtensor": Case(parallelism={"spmd_backend": "full_dtensor"}),
    "full_dtensor, hybrid 2x2": Case(
        ranks=4,
        parallelism={"spmd_backend": "full_dtensor", "data_parallel_replicate_degree": 2},
    ),
    "full_dtensor, tensor parallel": Case(
        ranks=4, parallelism={"spmd_backend": "full_dtensor", "tensor_parallel_degree": 2}
    ),
}


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("assets")
    titan_ranks.make_assets(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class Runs:
    """Trains cases by one sharder or another, and tells the table what came of it."""

    pools: dict[str, workers.Pools]
    assets: pathlib.Path
    folder: pathlib.Path
    tell: Callable[[str, str, str], None]

    def train(self, sharder: str, case: Case, **files: typing.Any) -> Trained:
        """Return what the last rank found: in a pipeline it has the loss."""
        output = self.folder / sharder
        arguments = (sharder, case, Files(self.assets, output, **files))
        pools = self.pools[sharder]
        return pools.spawn(titan_ranks.train, case.ranks, *arguments, timeout_s=400)[-1]

    def compare(self, name: str, found: Trained, wanted: Trained, tolerance: float) -> None:
        """Compare two trainings and put the difference into the table."""
        differences = [
            *map(_difference, found.losses, wanted.losses),
            *map(_difference, found.norms, wanted.norms),
        ]
        self.tell("torchtitan", name, f"{max(differences):.1e}")
        assert found.steps == wanted.steps
        assert max(differences) <= tolerance, (found, wanted)
        assert found.weights.keys() == wanted.weights.keys()
        for each, (total, squares) in wanted.weights.items():
            assert abs(found.weights[each][1] - squares) <= 10 * tolerance * squares, each
            assert abs(found.weights[each][0] - total) <= 10 * tolerance * squares**0.5 * 30, each


def _difference(found: float, wanted: float) -> float:
    return abs(found - wanted) / abs(wanted)


@pytest.fixture
def runs(
    pools_by_sharder: dict[str, workers.Pools],
    assets: pathlib.Path,
    tmp_path: pathlib.Path,
    tell: Callable[[str, str, str], None],
) -> Runs:
    return Runs(pools_by_sharder, assets, tmp_path, tell)


@pytest.mark.parametrize("name", CASES)
def test_training_equals_fsdp2(runs: Runs, name: str) -> None:
    wanted, found = (runs.train(sharder, CASES[name]) for sharder in SHARDERS)
    assert (wanted.classes, found.classes) == (["DTensor"], ["ShardedTensor"])
    runs.compare(name, found, wanted, CASES[name].tolerance)
