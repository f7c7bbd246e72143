"""Plans of runs: what they say, what they refuse, and how they grow."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import threading
import typing

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from planned_runs import Mlp
from shardkit import (
    ConfigError,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    RunPlan,
    ShardedTensor,
    StateError,
    WrapError,
    plan,
)
from shardkit.optim import LocalOptimizer

WIDTH = 256  # A block has more than 1 MiB, so it travels alone.
ROWS = torch.empty(1024, WIDTH, device="meta")
BLOCKS: typing.Any = {"blocks.*": {}}


def planned(model: nn.Module | None = None, **options: typing.Any) -> RunPlan:
    given = {"mesh": 4, "policy": BLOCKS, **options}
    return plan(Mlp(WIDTH, 4) if model is None else model, ROWS, **given)


def test_the_totals_are_what_can_be_reckoned() -> None:
    model = Mlp(WIDTH, 4)
    found = planned(model, device="cpu")
    nbytes = sum(param.nbytes for param in model.parameters())
    shard = found.between_steps["parameters"]
    assert (shard - found.padding_nbytes) * 4 == pytest.approx(nbytes, abs=4 * 64)
    assert found.between_steps["optimizer state"] == pytest.approx(2 * shard, abs=4 * 100)
    assert found.most_of_kind["gradients"] == shard
    assert found.num_params * 4 == nbytes
    assert found.peak.nbytes == sum(found.peak.by_kind.values())


def test_the_peak_has_a_name_and_owners() -> None:
    found = planned()
    assert found.peak.where.startswith("backward of blocks.")
    assert len(found.peak.owners) == 10
    assert "activations" in {each.kind for each in found.peak.owners}
    assert "unsharded" in found.peak.by_kind
    text = str(found)
    assert found.peak.where in text
    assert "reduce_scatter_base over 4 ranks" in text


def test_a_loss_outside_of_the_model_is_an_instant_of_its_own() -> None:
    def loss(output: Tensor) -> Tensor:
        return output.expand(2000, *output.shape).square().sum()

    found = planned(loss=loss)
    assert found.peak.where == "loss"
    assert planned().instants[-1].where != "loss"


def test_collectives_are_those_of_nccl() -> None:
    found = {(each.op, each.num_ranks): each.count for each in planned(mesh=(2, 4)).collectives}
    assert found["allgather_base", 4] == 4 + 3 + 1
    assert found["reduce_scatter_base", 4] == 5
    assert found["allreduce", 2] == 5 + 1


def test_the_model_stays_as_it_is() -> None:
    model = Mlp(WIDTH, 2)
    before = [param.clone() for param in model.parameters()]
    planned(model)
    assert not any(isinstance(param, ShardedTensor) for param in model.parameters())
    assert all(map(torch.equal, model.parameters(), before))


def test_any_rank_of_a_large_mesh_can_be_played() -> None:
    first, last = (planned(mesh=(64, 256), rank=rank) for rank in (0, 64 * 256 - 1))
    assert {each.num_ranks for each in last.collectives} == {64, 256}
    assert last.most_of_kind["unsharded"] == first.most_of_kind["unsharded"]


def test_sizes_of_a_mesh_may_be_integers_of_numpy() -> None:
    assert planned(mesh=np.int64(4)).peak_nbytes == planned(mesh=4).peak_nbytes
    sizes = np.array([2, 4])
    assert planned(mesh=sizes, rank=5).peak_nbytes == planned(mesh=(2, 4), rank=5).peak_nbytes


def test_a_plan_of_numbers_of_numpy_can_be_written_as_json() -> None:
    made = planned(mesh=4, rank=np.int64(1), budget=np.int64(1 << 40))
    assert json.loads(json.dumps(dataclasses.asdict(made)))["rank"] == 1


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_plan_in_anomaly_mode_is_the_same() -> None:
    with torch.autograd.detect_anomaly():
        found = planned()
        assert torch.is_anomaly_enabled()
    assert found.peak_nbytes == planned().peak_nbytes


def test_what_a_budget_leaves_and_what_helps() -> None:
    peak = planned().peak_nbytes
    assert planned(budget=peak).fits
    assert planned(budget=peak).margin_nbytes == 0
    found = planned(budget=peak - 1)
    assert not found.fits
    assert found.margin_nbytes == -1
    assert [each.change.split()[0] for each in found.advice] == ["compute", "keep", "half"]
    assert all(each.peak_nbytes < peak for each in found.advice)
    assert "NOT fit" in str(found)
    # An option that is None is as good as left out.
    assert planned(budget=peak - 1, offload_policy=None, strategy=None).advice == found.advice


def test_a_budget_may_be_a_text() -> None:
    assert planned(budget="80GiB").budget_nbytes == 80 * 2**30
    for text in ("", "80 iB", "-1GB", 0, -1):
        with pytest.raises(ConfigError, match="budget must be a number of bytes such as"):
            planned(budget=text)


def test_what_the_allocator_reserves_is_said() -> None:
    assert planned(device="cpu").reserved_nbytes is None
    found = planned(budget=2**40)
    assert found.reserved_nbytes is not None
    assert found.peak_nbytes < found.reserved_nbytes < 2 * found.peak_nbytes
    assert "reserved by the allocator: " in str(found)
    assert "gives back what is unused" not in str(found)
    assert "gives back what is unused" in str(planned(budget=found.peak_nbytes))


def test_more_of_anything_is_never_less_memory() -> None:
    base = planned().peak_nbytes
    assert plan(Mlp(WIDTH, 5), ROWS, mesh=4, policy=BLOCKS).peak_nbytes > base
    assert plan(Mlp(WIDTH, 4), torch.empty(1100, WIDTH), mesh=4, policy=BLOCKS).peak_nbytes > base
    assert planned(mesh=2).peak_nbytes > base
    assert planned(mesh=8).peak_nbytes < base
    assert planned(reshard_after_forward=False).peak_nbytes > base
    assert planned(recompute=True).peak_nbytes < base
    assert planned(recompute={}).peak_nbytes == planned(recompute=True).peak_nbytes
    assert planned(recompute=False).peak_nbytes == base


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("rising", "variants"),
    [
        ("rows", [{"rows": rows} for rows in (64, 256, 1024, 2048)]),
        ("ranks that share", [{"mesh": mesh} for mesh in (16, 8, 4, 2, 1)]),
        ("replicas", [{"mesh": mesh} for mesh in ((1, 8), (2, 4), (4, 2))]),
        ("what is kept", [{"reshard_after_forward": kept} for kept in (True, 2, False)]),
        ("blocks that are kept", [{"recompute": {"every": n}} for n in (1, 2)] + [{}]),
        ("optimizer state", [{"optimizer": name} for name in ("none", "sgd", "adamw")]),
        ("bytes of compute", [{"mp_policy": MixedPrecisionPolicy(dtype)}
                              for dtype in (torch.bfloat16, torch.float32)]),
    ],
)  # fmt: skip
def test_peaks_rise_with_what_rises(
    device: str, rising: str, variants: list[dict[str, typing.Any]]
) -> None:
    peaks = []
    for variant in variants:
        given = {"mesh": 4, "policy": BLOCKS, "device": device, **variant}
        rows = torch.empty(given.pop("rows", 1024), WIDTH, device="meta")
        peaks.append(plan(Mlp(WIDTH, 4), rows, **given).peak_nbytes)
    assert peaks == sorted(peaks), rising


def test_what_fits_a_budget_fits_every_larger_one() -> None:
    peak = planned().peak_nbytes
    found = [planned(budget=peak * part // 8) for part in (3, 5, 7, 8, 9)]
    assert {each.peak_nbytes for each in found} == {peak}
    assert [each.fits for each in found] == sorted(each.fits for each in found)
    fitting = [{a.change for a in each.advice if a.fits} for each in found if not each.fits]
    assert all(fewer <= more for fewer, more in itertools.pairwise(fitting))


def test_parameters_that_are_kept_in_part_may_be_resharded() -> None:
    kept, resharded = (planned(budget=1, reshard_after_forward=n) for n in (2, True))
    advice = {each.change: each.peak_nbytes for each in kept.advice}
    assert advice["reshard after forward"] == resharded.peak_nbytes < kept.peak_nbytes
    assert "reshard after forward" not in {each.change for each in resharded.advice}


def test_advice_is_in_the_order_of_costs_and_each_was_planned() -> None:
    given: dict[str, typing.Any] = {"mesh": (2, 4), "reshard_after_forward": False}
    found = planned(**given, budget=1)
    changed = [
        {"recompute": True},
        {"reshard_after_forward": True},
        {"mesh": 8},
        {"offload_policy": CPUOffloadPolicy()},
        {"accumulate": 2},
    ]
    words = ["compute", "reshard", "shard", "keep", "half", "all"]
    assert [each.change.split()[0] for each in found.advice] == words
    for advice, change in zip(found.advice, changed, strict=False):
        rows = ROWS[: len(ROWS) // change.get("accumulate", 1)]
        again = plan(Mlp(WIDTH, 4), rows, policy=BLOCKS, **{**given, **change})
        assert advice.peak_nbytes == again.peak_nbytes
        assert not advice.fits


def test_advice_has_a_fused_kernel_where_the_step_takes_the_most_memory() -> None:
    def advised(rows: Tensor, optimizer: typing.Any) -> list[tuple[str, int]]:
        found = plan(Mlp(WIDTH, 4), rows, mesh=1, optimizer=optimizer, budget=1)
        return [(each.change, each.peak_nbytes) for each in found.advice if "fused" in each.change]

    local = functools.partial(LocalOptimizer, optimizer_class=AdamW)
    for optimizer in (AdamW, local):
        fused = functools.partial(optimizer, fused=True)
        peak = plan(Mlp(WIDTH, 4), ROWS[:1], mesh=1, optimizer=fused).peak_nbytes
        assert advised(ROWS[:1], optimizer) == [("step with a fused kernel (fused=True)", peak)]
        assert advised(ROWS[:1], fused) == []
    assert advised(ROWS[:1], torch.optim.Adafactor) == []
    assert advised(ROWS, AdamW) == []  # Backward needs more.


def test_a_model_on_meta_is_planned_as_one_with_values() -> None:
    with torch.device("meta"):
        model = Mlp(WIDTH, 4)
    assert planned(model) == planned()


def test_offloaded_shards_and_state_are_on_the_host() -> None:
    found = planned(offload_policy=CPUOffloadPolicy())
    assert "parameters" not in found.between_steps
    assert "optimizer state" not in found.between_steps
    assert found.host_nbytes > 3 * planned().between_steps["parameters"]


class Offset(nn.Module):
    """A layer with a buffer, which no operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.register_buffer("table", torch.zeros(1000, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) + self.table.sum(0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_buffers_are_counted(device: str) -> None:
    model = Offset()
    found = planned(model, device=device).between_steps["buffers"]
    assert model.table.nbytes <= found < model.table.nbytes + 1024


@pytest.mark.parametrize("as_option", [True, False])
@pytest.mark.parametrize("collect", [set, iter, lambda params: dict.fromkeys(params).keys()])
def test_ignored_parameters_stay_whole(collect: typing.Any, as_option: bool) -> None:
    model = Offset()
    without = planned(model).between_steps["parameters"]
    kept = nn.Parameter(torch.zeros(1000, WIDTH), requires_grad=False)
    model.blocks[0].kept = kept
    ignored: typing.Any = {"ignored_params": collect([kept]) if as_option else {kept}}
    options = ignored if as_option else {"policy": {"blocks.*": ignored, "": ignored}}
    found = planned(model, **options)
    assert found.between_steps["parameters"] == without + kept.nbytes


def test_a_policy_halves_what_is_unsharded() -> None:
    wide = planned().most_of_kind["unsharded"]
    narrow = planned(mp_policy=MixedPrecisionPolicy(torch.bfloat16)).most_of_kind["unsharded"]
    assert narrow == pytest.approx(wide / 2, abs=64)  # Each buffer is aligned.


def test_attention_is_that_of_a_fused_kernel() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH)])

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.blocks[0](x).view(1, 4, -1, 3 * WIDTH).chunk(3, -1)
            attend = nn.functional.scaled_dot_product_attention
            return attend(query, key, value, is_causal=True)

    long = torch.empty(4 * 8192, WIDTH, device="meta")
    scores_nbytes = 4 * 8192 * 8192 * 4
    for device in ("cpu", "cuda"):
        found = plan(Attends(), long, mesh=2, device=device, policy=BLOCKS)
        assert found.peak_nbytes < scores_nbytes


class ByValue(nn.Module):
    """Its second layer looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x) if x.sum().item() > 0 else x


def test_a_model_that_needs_values_is_named() -> None:
    with pytest.raises(ConfigError, match="forward of the root needs values"):
        planned(ByValue())
    planned()  # Nothing of the failed plan is left.


def test_a_loss_that_needs_values_is_not_taken_for_a_module() -> None:
    with pytest.raises(ConfigError, match="and the model, or its loss, needs values"):
        planned(loss=lambda output: output.sum() * output.sum().item())


@dataclasses.dataclass
class Output:
    """What models of transformers return."""

    loss: Tensor | None
    logits: Tensor


class WithLoss(nn.Module):
    """A model that computes its loss, if it gets labels."""

    def __init__(self, make: typing.Any) -> None:
        super().__init__()
        self.make = make
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 50_000)])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> typing.Any:
        logits = self.blocks[0](x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return self.make(loss=loss, logits=logits)


def test_the_loss_of_an_output_is_that_of_the_step() -> None:
    x, labels = torch.empty(64, WIDTH), torch.empty(64, dtype=torch.long)
    with pytest.raises(ConfigError, match="the loss in the model's Output is None"):
        plan(WithLoss(Output), x, mesh=2)
    alone = plan(WithLoss(Output), x, mesh=2, loss=lambda output: output.logits.sum())
    batch = {"x": x, "labels": labels}
    of_dict, of_output = (plan(WithLoss(make), batch, mesh=2) for make in (dict, Output))
    assert alone.peak_nbytes < of_output.peak_nbytes == of_dict.peak_nbytes


class KeepsMore(torch.optim.SGD):
    """Keeps state that belongs to no parameter, as MADGRAD does."""

    def step(self, closure: typing.Any = None) -> None:
        super().step(closure)
        self.state["k"] = torch.zeros(1000, device="meta")  # type: ignore[index, assignment]


def test_state_of_an_optimizer_may_belong_to_no_parameter() -> None:
    found = planned(optimizer=KeepsMore).between_steps
    assert found["optimizer state"] == 4000


class StopsByValue(torch.optim.SGD):
    """Steps while gradients are large."""

    def step(self, closure: typing.Any = None) -> None:
        if any(param.grad.norm().item() > 1 for param in self.param_groups[0]["params"]):
            super().step(closure)


class CutsByValue(torch.optim.SGD):
    """Takes large gradients for zero."""

    @torch.no_grad()
    def step(self, closure: typing.Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            for index in (param.grad > 1).nonzero():
                param.grad[tuple(index)] = 0
        super().step(closure)


@pytest.mark.parametrize("optimizer", [StopsByValue, CutsByValue])
def test_an_optimizer_that_needs_values_is_not_taken_for_the_model(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    with pytest.raises(ConfigError, match="a step of the optimizer needs values") as caught:
        planned(optimizer=optimizer)
    assert re.search(r"[^.\s]\. Plan with an optimizer that has", str(caught.value))


def test_an_optimizer_that_runs_the_model_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS makes as many as it wants: its step needs a clos"):
        planned(optimizer=torch.optim.LBFGS)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
@pytest.mark.parametrize("is_local", [False, True])
def test_a_fused_kernel_takes_no_memory_beside_the_state(name: str, *, is_local: bool) -> None:
    made = getattr(torch.optim, name)
    cls = functools.partial(LocalOptimizer, optimizer_class=made) if is_local else made
    fused, by_lists = (
        plan(Mlp(WIDTH, 4), ROWS[:1], mesh=1, optimizer=functools.partial(cls, lr=0.1, **way))
        for way in ({"fused": True}, {"foreach": True})
    )
    assert fused.between_steps == by_lists.between_steps
    assert fused.peak.where != "optimizer step"
    assert (by_lists.peak.where == "optimizer step") == (name != "SGD")


def test_optimizers_choose_as_on_the_device() -> None:
    for name, device in itertools.product(["AdamW", "Adafactor"], ["cuda", "cpu"]):
        peaks = {}
        for way in (None, False, True):
            optimizer = functools.partial(getattr(torch.optim, name), foreach=way)
            found = plan(Mlp(WIDTH, 4), ROWS[:1], mesh=1, device=device, optimizer=optimizer)
            peaks[way] = found.peak_nbytes
        takes_lists = (name, device) == ("AdamW", "cuda")  # Adafactor does so only if it is asked.
        assert peaks[None] == peaks[takes_lists] != peaks[not takes_lists], (name, device)


def test_a_step_for_graphs_can_be_planned() -> None:
    given: typing.Any = {"model": Mlp(WIDTH, 4), "batch": ROWS, "mesh": 4}
    optimizer = functools.partial(AdamW, capturable=True)
    plan(**given, optimizer=optimizer)
    with pytest.raises(AssertionError, match="capturable=True"):  # As on a CPU.
        plan(**given, device="cpu", optimizer=optimizer)


def test_a_model_that_trains_nothing_is_refused() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
    for model in (frozen, nn.ReLU()):
        with pytest.raises(ConfigError, match="no parameter of the model requires a gradient"):
            plan(model, torch.empty(2, 4), mesh=2, device="cpu")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_plan_trains_where_gradients_are_off(mode: typing.Any) -> None:
    expected = plan(Mlp(16, 1), torch.empty(8, 16), mesh=2, device="cpu")
    with mode():
        found = plan(Mlp(16, 1), torch.empty(8, 16), mesh=2, device="cpu")
    assert found == expected


def test_a_model_that_cannot_be_copied_is_refused_by_name() -> None:
    model = Mlp(16, 1)
    model.lock = threading.Lock()
    refusal = "copy.deepcopy of this Mlp and the options raises TypeError: cannot pickle"
    with pytest.raises(ConfigError, match=refusal):
        plan(model, torch.empty(8, 16), mesh=2)


def test_an_error_of_the_model_names_the_batch() -> None:
    batch = torch.empty(2, WIDTH + 1, device="meta")
    with pytest.raises(RuntimeError) as caught:
        plan(Mlp(WIDTH, 4), batch, mesh=4)
    note = "while a plan ran the model's forward with this batch: (2, 257) of torch.float32"
    assert note in caught.value.__notes__


def test_a_model_whose_shapes_a_forward_tells_is_refused() -> None:
    with pytest.raises(WrapError, match=r"parameter '0.weight' has no shape yet: LazyLinear"):
        plan(nn.Sequential(nn.LazyLinear(4)), torch.empty(2, 8), mesh=2)


def test_arguments_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank must be from 0 to 3"):
        planned(rank=4)
    with pytest.raises(ConfigError, match="accumulate must be 1 micro-batch of a step or more"):
        planned(accumulate=0)
    with pytest.raises(ConfigError, match=r"accumulate must be an integer, got 2.0"):
        planned(accumulate=2.0)
    with pytest.raises(ConfigError, match="or sizes of axes such as \\(2, 8\\), got '2x8'"):
        planned(mesh="2x8")
    with pytest.raises(ConfigError, match=r"each number of mesh must be an integer, got 8.0"):
        planned(mesh=(2, 8.0))
    with pytest.raises(ConfigError, match="optimizer must be one of adamw, adam, sgd, none"):
        planned(optimizer="lion")
    with pytest.raises(ConfigError, match="or a function, got AdamW"):
        planned(optimizer=AdamW([nn.Parameter(torch.zeros(1))]))
    with pytest.raises(ConfigError, match="shard takes the place of policy"):
        planned(shard=lambda *_: None)
    with pytest.raises(ConfigError, match="shard must be a function or None, got 'zero2'"):
        planned(shard="zero2")
    with pytest.raises(ConfigError, match="choose must be True or False, got 'no'"):
        planned(choose="no")
    with pytest.raises(ConfigError, match=r"device must be 'cpu' or the type .* got None"):
        planned(device=None)
    with pytest.raises(ConfigError, match=r"loss must be a function .* got 'mean'"):
        planned(loss="mean")
    with pytest.raises(ConfigError, match="loss returned None for the model's output"):
        planned(loss=lambda _: None)
    with pytest.raises(ConfigError, match="recompute must be True, False or a dict"):
        planned(recompute="yes")
    with pytest.raises(ConfigError, match=r"a plan takes a module first.* got <class"):
        plan(typing.cast("typing.Any", Mlp), torch.empty(2, 8), mesh=2)


def test_a_process_with_a_process_group_cannot_plan(tmp_path: typing.Any) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(StateError, match="has a process group"):
            planned()
    finally:
        torch.distributed.destroy_process_group()
