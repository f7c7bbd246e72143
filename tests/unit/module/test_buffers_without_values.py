"""Buffers that no file has: computed again by load_full, named where nobody has written them."""

from __future__ import annotations

import copy
import typing
import warnings

import pytest
import torch
from torch import Tensor, nn

from recording import recording_mesh
from shardkit import StateError, fully_shard, materialize
from shardkit.checkpoint import load_full

WIDTH = 4


class Table(nn.Module):
    """A table that its constructor computes, and no method of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(float(WIDTH)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class Reset(Table):
    """A parameter beside the table; both are initialized by one method."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(float(WIDTH)))
        nn.init.normal_(self.gain)
        self.gain.data.mul_(self.gain.data.norm())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table * self.gain


class ResetBuffers(Table):
    def reset_buffers(self) -> None:
        self.table = torch.arange(float(WIDTH))


def frequencies(config: typing.Any = None, device: typing.Any = None) -> tuple[Tensor, float]:
    numbers = torch.arange(WIDTH, dtype=torch.int64).to(device=device, dtype=torch.float)
    return config["theta"] ** (-numbers / WIDTH), 1.0


class Rotary(nn.Module):
    """As transformers 4 has them: the function is an attribute, the first table no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"theta": 100.0}
        self.rope_init_fn = frequencies
        table, self.attention_scaling = self.rope_init_fn(self.config)
        self.register_buffer("inv_freq", table, persistent=False)
        self.original_inv_freq = self.inv_freq

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inv_freq * self.original_inv_freq


class LaterRotary(Rotary):
    """Both tables are buffers."""

    def __init__(self) -> None:
        super().__init__()
        table = self.original_inv_freq
        del self.original_inv_freq
        self.register_buffer("original_inv_freq", table.clone(), persistent=False)


class Owner(nn.Module):
    """Its `_init_weights` computes the table of a module inside, and nothing else of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = Table()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Table):
            module.table.copy_(torch.arange(float(WIDTH)))
        elif isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


class Drawn(nn.Module):
    """A table of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table)


def make(kind: type[nn.Module]) -> typing.Any:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.BatchNorm1d(WIDTH))


def on_meta(kind: type[nn.Module], num_ranks: int = 1, rank: int = 0) -> typing.Any:
    """Return a sharded model."""
    mesh, _ = recording_mesh((num_ranks,), rank=rank)
    with torch.device("meta"):
        model = make(kind)
    fully_shard(model[0], mesh)
    return fully_shard(model, mesh)


# --- load_full ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Reset, ResetBuffers, Rotary, LaterRotary, Owner])
def test_load_full_has_modules_compute_what_files_lack(kind: type[nn.Module]) -> None:
    torch.manual_seed(3)
    plain = make(kind)
    model = on_meta(kind)
    before = torch.get_rng_state()
    assert load_full(plain.state_dict(), model).meta_keys == []
    assert torch.equal(torch.get_rng_state(), before), "numbers drawn later are others"
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    for name, param in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), param), name
    x = torch.randn(3, WIDTH)
    assert torch.equal(model(x), plain(x))


def test_what_cannot_be_computed_stays_on_meta_and_is_named() -> None:
    model = on_meta(Table)
    assert load_full(make(Table).state_dict(), model).meta_keys == ["1.table"]
    with pytest.raises(StateError, match=r"buffers '1\.table'.*materialize\(model, init_fn\)"):
        model(torch.ones(2, WIDTH))
    model[1].table = torch.ones(WIDTH)
    model(torch.ones(2, WIDTH))


def test_an_initialization_that_fails_leaves_it_on_meta() -> None:
    class Failing(Table):
        def reset_parameters(self) -> None:
            raise RuntimeError

    model = on_meta(Failing)
    assert load_full(make(Failing).state_dict(), model).meta_keys == ["1.table"]
    with pytest.raises(RuntimeError):
        materialize(model)


def test_missing_buffers_that_files_have_are_not_computed() -> None:
    model = on_meta(Table)
    state = make(Table).state_dict()
    del state["2.running_var"]
    loaded = load_full(state, model, strict=False)
    assert loaded.missing_keys == ["2.running_var"]
    assert set(loaded.meta_keys) == {"1.table", "2.running_var"}


def test_a_table_of_random_numbers_is_the_same_on_all_ranks() -> None:
    tables = []
    for rank in range(2):
        model = on_meta(Drawn, num_ranks=2, rank=rank)
        torch.manual_seed(rank)
        load_full(make(Drawn).state_dict(), model)
        tables.append(model[1].table)
    assert torch.equal(*tables)


@pytest.mark.parametrize("kind", [Rotary, LaterRotary])
def test_materialize_computes_tables_of_rotary_positions(kind: type[nn.Module]) -> None:
    model = materialize(on_meta(kind))
    assert torch.equal(model[1].inv_freq, frequencies({"theta": 100.0})[0])
    assert torch.equal(model[1].original_inv_freq, model[1].inv_freq)


# --- to_empty -----------------------------------------------------------------------------------


def emptied(kind: type[nn.Module]) -> typing.Any:
    model = on_meta(kind)
    model.to_empty(device="cpu")
    model.load_state_dict(make(kind).state_dict())
    return model


def test_buffers_that_nobody_wrote_after_to_empty_are_named() -> None:
    model = emptied(Table)
    with pytest.warns(UserWarning, match=r"buffers '1\.table' got memory from to_empty\(\)"):
        model(torch.ones(2, WIDTH))
    model(torch.ones(2, WIDTH))  # Said once.


def test_persistent_ones_are_named_unless_they_are_loaded() -> None:
    model = on_meta(Table)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.zeros_(param)
    named = r"buffers '1\.table', '2\.running_mean', '2\.running_var', '2\.num_batches_tracked' got"
    with pytest.warns(UserWarning, match=named):
        model(torch.ones(2, WIDTH))


@pytest.mark.parametrize(
    "write",
    [
        lambda table: setattr(table, "table", torch.ones(WIDTH)),
        lambda table: table.table.fill_(1),
        lambda table: table.table.zero_(),
        lambda table: table.register_buffer("table", torch.ones(WIDTH)),
        # Past the version counter, as collectives write.
        lambda table: table.table.data.copy_(torch.arange(1.0, WIDTH + 1)),
        lambda table: setattr(table.table, "data", torch.arange(1.0, WIDTH + 1)),
        lambda table: table.table.numpy().fill(3),
    ],
    ids=["replaced", "filled", "zeros", "registered anew", "data", "other data", "numpy"],
)
def test_nothing_is_said_of_what_was_written(write: typing.Callable[[nn.Module], object]) -> None:
    model = emptied(Table)
    write(model[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, WIDTH))


def test_part_by_part_and_in_copies() -> None:
    model = on_meta(Reset)
    for module in model:
        module.to_empty(device="cpu")
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(model)(torch.ones(2, WIDTH))
        model(torch.ones(2, WIDTH))


class Converted(nn.Module):
    """Computes its table in each conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)

    def _apply(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        super()._apply(*args, **kwargs)
        self.table.copy_(torch.ones(WIDTH))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


def test_a_module_may_write_its_buffers_in_the_conversion() -> None:
    model = emptied(Converted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, WIDTH))
