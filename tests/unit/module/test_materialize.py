"""`materialize`: what is initialized, in which order, by what, and what is refused."""

from __future__ import annotations

import typing

import pytest
import torch
from torch import Tensor, nn

from models import Parent
from recording import recording_mesh
from shardkit import ShardedTensor, fully_shard, materialize
from shardkit._module.materialize import StandIns

pytestmark = pytest.mark.helpers

RANKS = 4


class Scale(nn.Module):
    """Holds a parameter and tables itself, beside a module."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.empty(width))
        self.register_buffer("table", torch.empty(width), persistent=False)
        self.register_buffer("places", torch.empty(width, dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.empty(width, dtype=torch.bool))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)
        self.gain.data /= self.gain.data.norm()  # Reads the whole.
        self.table = torch.arange(float(len(self.gain)))
        self.places.copy_(torch.arange(len(self.gain)))
        self.mask.fill_(value=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gain * self.table


def make_model() -> nn.Sequential:
    """Return a model with convolutions, normalization, attention, an RNN and lists of weights."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)),
        Scale(),
        nn.MultiheadAttention(6, 2, add_bias_kv=True),
        nn.GRU(6, 3),
        nn.Embedding(7, 6, padding_idx=3),
        nn.Conv2d(3, 4, 3, bias=False),
    )


def sharded(model: nn.Sequential, rank: int = 0, world_size: int = RANKS) -> nn.Sequential:
    mesh, _ = recording_mesh((world_size,), rank=rank)
    for index in (0, 1, 2, 4):
        fully_shard(model[index], mesh)
    return fully_shard(model, mesh)


def on_meta(make: typing.Callable[[], typing.Any] = make_model) -> typing.Any:
    with torch.device("meta"):
        return make()


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    tensors = dict([*plain.named_parameters(), *plain.named_buffers()])
    found = dict([*model.named_parameters(), *model.named_buffers()])
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        mine = found[name]
        if isinstance(mine, ShardedTensor):
            assert torch.equal(mine.to_local(), mine.spec.slice_full(expected.detach())), name
        else:
            assert mine.dtype == expected.dtype
            assert torch.equal(mine, expected), name


def check_as_plain(
    make: typing.Callable[[], typing.Any], shard: typing.Callable[[typing.Any], typing.Any]
) -> typing.Any:
    """Compare a model that `shard` makes with a plain one; return it."""
    torch.manual_seed(3)
    plain = make()
    model = shard(make)
    torch.manual_seed(3)
    materialize(model)
    assert_equal(model, plain)
    return model


def as_one_group(make: typing.Callable[[], typing.Any]) -> typing.Any:
    mesh, _ = recording_mesh((RANKS,), rank=1)
    return fully_shard(on_meta(make), mesh)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(RANKS))
def test_values_are_those_of_the_plain_construction(rank: int) -> None:
    torch.manual_seed(3)
    plain = make_model()
    model = sharded(on_meta(), rank)
    params = list(model.parameters())
    torch.manual_seed(3)
    assert materialize(model) is model
    assert_equal(model, plain)
    assert list(map(id, model.parameters())) == list(map(id, params))
    assert torch.initial_seed() == 3
    after = torch.rand(3)
    torch.manual_seed(3)
    make_model()
    assert torch.equal(torch.rand(3), after)  # As many numbers were drawn.


def test_groups_have_no_influence_on_the_values() -> None:
    check_as_plain(make_model, as_one_group)


def test_a_plain_model_gets_the_same_values_in_place() -> None:
    torch.manual_seed(3)
    plain = make_model()
    model = on_meta()
    weight, table = model[0][0].weight, model[1].table
    torch.manual_seed(3)
    materialize(model)
    assert_equal(model, plain)
    assert model[0][0].weight is weight
    assert model[1].table is table
    x = torch.randn(4, 5)
    assert torch.equal(model[1](model[0](x)), plain[1](plain[0](x)))
    assert torch.equal(model[3](torch.ones(2, 6))[0], plain[3](torch.ones(2, 6))[0])


def test_attributes_and_frozen_parameters_stay() -> None:
    model = on_meta()
    model[0][0].weight.requires_grad_(requires_grad=False)
    model[0][0].bias.decay = 0.5
    sharded(model)
    materialize(model)
    assert not model[0][0].weight.requires_grad
    assert model[0][0].bias.requires_grad
    assert model[0][0].bias.decay == 0.5


def test_pieces_lie_end_to_end() -> None:
    model = materialize(sharded(on_meta()))
    for param in model.parameters():
        assert param.flat is not None
        assert param.to_local().untyped_storage().data_ptr() == param.flat.data_ptr()


@pytest.mark.parametrize("shard_last", [False, True])
def test_group_after_group_as_they_are_sharded(shard_last: bool) -> None:
    """Right after each `fully_shard`; what is there already is not drawn again."""
    model = on_meta()
    mesh, _ = recording_mesh((2,))
    torch.manual_seed(5)
    for index in (0, 1):
        materialize(fully_shard(model[index], mesh))
    before = model[0][0].weight.to_local().clone()
    if shard_last:
        fully_shard(model, mesh)
    materialize(model)
    assert torch.equal(model[0][0].weight.to_local(), before)
    torch.manual_seed(5)
    plain = on_meta()
    for part in (plain[0], plain[1], plain):
        materialize(part)
    assert_equal(model, plain)


def test_one_module_of_a_list() -> None:
    """The other one, of the same group, is left on meta."""
    model = on_meta()
    mesh, _ = recording_mesh((2,))
    fully_shard([model[0], model[1]], mesh)
    materialize(model[0])
    assert model[1].gain.is_meta
    materialize(model)
    assert not any(p.is_meta for p in model.parameters())
    assert model[0][0].weight.flat is model[1].gain.flat


def test_mixed_dtypes() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3).double())

    torch.manual_seed(1)
    with torch.device("cpu"):
        plain = nn.Sequential(
            nn.Linear(4, 4),
            nn.Linear(4, 4, dtype=torch.bfloat16),
            nn.Linear(4, 3, dtype=torch.float64),
        )
    mesh, _ = recording_mesh((3,), rank=1)
    model = fully_shard(on_meta(make), mesh)
    torch.manual_seed(1)
    materialize(model)
    assert_equal(model, plain)


def test_under_the_meta_device() -> None:
    """As where `fully_shard` and this are called in a constructor."""
    torch.manual_seed(3)
    plain = make_model()
    with torch.device("meta"):
        model = sharded(make_model())
        torch.manual_seed(3)
        materialize(model)
    assert_equal(model, plain)


# --- ties and values that are there ---------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.tokens.weight
        self.again = nn.Linear(4, 7, bias=False)
        self.again.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(x)))


def test_tied_parameters_get_the_values_of_the_first_module() -> None:
    calls: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        calls.append(module)
        module.reset_parameters()

    mesh, _ = recording_mesh((2,))
    model = fully_shard(on_meta(Tied), mesh)
    torch.manual_seed(2)
    materialize(model, init)
    assert model.tokens.weight is model.head.weight is model.again.weight
    assert calls == [model.tokens, model.body, model.head]  # The head for its bias.
    torch.manual_seed(2)
    whole = nn.Embedding(7, 4).weight.detach()
    assert torch.equal(model.tokens.weight.to_local(), model.tokens.weight.spec.slice_full(whole))


class Aliased(nn.Module):
    """Holds one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.alias = nn.Parameter(torch.empty(3, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.alias.T


@pytest.mark.parametrize("shard", [on_meta, as_one_group])
def test_a_module_that_holds_one_parameter_under_two_names(
    shard: typing.Callable[[typing.Any], typing.Any],
) -> None:
    model = check_as_plain(Aliased, shard)
    assert model.weight is model.alias


def test_what_has_values_keeps_them() -> None:
    mesh, _ = recording_mesh((2,))
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    bias = layer.bias.detach().clone()
    model = nn.Sequential(nn.Linear(4, 4), layer)
    first = model[0].weight.detach().clone()
    fully_shard(model, mesh)
    state = torch.get_rng_state()
    materialize(model)
    assert torch.equal(layer.bias.to_local(), layer.bias.spec.slice_full(bias))
    assert torch.equal(model[0].weight.to_local(), model[0].weight.spec.slice_full(first))
    torch.set_rng_state(state)
    whole = nn.Linear(4, 4).weight.detach()
    assert torch.equal(layer.weight.to_local(), layer.weight.spec.slice_full(whole))
    state = torch.get_rng_state()
    materialize(model)
    assert torch.equal(torch.get_rng_state(), state)


# --- by what --------------------------------------------------------------------------------------


def test_init_fn_is_called_once_for_each_module_that_holds_something() -> None:
    names: list[str] = []
    model = sharded(on_meta())
    by_module = {module: name for name, module in model.named_modules()}

    def init(module: nn.Module) -> None:
        names.append(by_module[module])
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            assert not isinstance(tensor, ShardedTensor)
            assert not tensor.is_meta
            tensor.data.fill_(1)

    materialize(model, init)
    assert names == ["0.0", "0.1", "1.linear", "1", "2.out_proj", "2", "3", "4", "5"]
    assert all(param.to_local().eq(1).all() for param in model.parameters())


def test_init_fn_of_fsdp1_that_gives_memory_itself() -> None:
    def init(module: nn.Module) -> None:
        module.to_empty(device=torch.device("cpu"), recurse=False)
        module.reset_parameters()

    torch.manual_seed(3)
    plain = make_model()[:2]
    model = on_meta(lambda: make_model()[:2])
    mesh, _ = recording_mesh((2,))
    fully_shard(model[0], mesh)
    fully_shard(model, mesh)
    torch.manual_seed(3)
    materialize(model, init)
    assert_equal(model, plain)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.empty(3), torch.empty(2)])
        self.named = nn.ParameterDict({"a": torch.empty(5)})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (*self.weights, self.named["a"]):
            nn.init.normal_(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.named["a"]


def test_containers_of_parameters_belong_to_their_module() -> None:
    check_as_plain(lambda: nn.Sequential(Lists()), as_one_group)


class Language(nn.Module):
    """As models of transformers: says how modules in it are initialized, or nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.other = Scale(4)
        self.head = nn.Linear(4, 7)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def init_weights(self) -> None:
        pytest.fail("it initializes the whole model")


def test_a_models_own_way_comes_first() -> None:
    model = on_meta(lambda: nn.ModuleDict({"language": Language(), "beside": nn.Linear(4, 4)}))
    plain = nn.ModuleDict({"language": Language(), "beside": nn.Linear(4, 4)})
    torch.manual_seed(3)
    plain["language"].apply(plain["language"]._init_weights)  # noqa: SLF001
    torch.manual_seed(3)
    materialize(model)
    for name in ("tokens.weight", "other.linear.weight"):
        mine, expected = (m["language"].get_parameter(name) for m in (model, plain))
        assert torch.equal(mine, expected), name
    assert model["language"].norm.weight.eq(1).all()
    assert model["language"].head.weight.std() < 0.05
    assert model["beside"].weight.std() > 0.1
    assert not model["language"].other.gain.isnan().any()


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("theta", torch.empty(4), persistent=False)
        self.rope_init()

    def rope_init(self) -> None:
        self.register_buffer("theta", torch.arange(4.0), persistent=False)


def test_modules_that_compute_tables_only() -> None:
    model = materialize(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Rope())))
    assert torch.equal(model[1].theta, torch.arange(4.0))


# --- what modules write inside others -------------------------------------------------------------


def sharded_alone(make: typing.Callable[[], typing.Any]) -> typing.Any:
    """Return a model whose modules are groups, of a mesh of one rank."""
    mesh, _ = recording_mesh((1,))
    model = on_meta(make)
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh)
    return fully_shard(model, mesh)


@pytest.mark.parametrize("shard", [on_meta, sharded_alone])
def test_a_transformer_is_initialized_as_by_its_constructor(
    shard: typing.Callable[[typing.Any], typing.Any],
) -> None:
    check_as_plain(lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), shard)


class Around(nn.Module):
    """A model whose own way leaves a module alone that initializes those inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self._init_weights(self.norm)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm) and module is self.norm:
            nn.init.constant_(module.weight, 2)
            nn.init.zeros_(module.bias)


@pytest.mark.parametrize("shard", [on_meta, sharded_alone])
def test_what_a_models_own_way_leaves_alone_initializes_modules_inside(
    shard: typing.Callable[[typing.Any], typing.Any],
) -> None:
    check_as_plain(Around, shard)


@pytest.mark.parametrize("shard", [on_meta, sharded_alone])
def test_a_parent_writes_scales_and_reads_its_children(
    shard: typing.Callable[[typing.Any], typing.Any],
) -> None:
    check_as_plain(Parent, shard)


@pytest.mark.parametrize("shard", [False, True])
def test_a_parent_does_not_overwrite_what_had_values(shard: bool) -> None:
    model = on_meta(Parent)
    model.second = nn.Linear(3, 4)
    before = [p.detach().clone() for p in model.second.parameters()]
    if shard:
        mesh, _ = recording_mesh((1,))
        fully_shard(model, mesh)
    materialize(model)
    for param, expected in zip(model.second.parameters(), before, strict=True):
        assert torch.equal(param.to_local().view_as(param) if shard else param, expected)  # type: ignore[operator]


class Aliasing(nn.Module):
    """Puts what one module inside holds in the place of what another one does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.first.weight, 2.0)
        nn.init.constant_(self.second.weight, 3.0)
        self.second.weight = nn.Parameter(self.first.weight.detach())


def test_a_parent_may_show_one_tensor_in_the_place_of_another() -> None:
    model = materialize(on_meta(Aliasing))
    assert all((param == 2.0).all() for param in model.parameters())
    assert model.first.weight is not model.second.weight


class Mixing(nn.Module):
    """Mixes rows of what a module inside holds by a sparse matrix, and keeps copies of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.register_buffer("first", torch.empty(3, 3))
        self.register_buffer("columns", torch.empty(3, 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.first.copy_(self.inner.weight)
            self.columns.copy_(self.inner.weight[:, 1:])
            if not self.first.is_meta:
                with torch.device("cpu"):
                    mixing = torch.ones(3, 3).to_sparse_csr()
                self.inner.weight.copy_(mixing @ self.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("shard", [on_meta, sharded_alone])
def test_a_parent_copies_and_mixes_what_its_child_holds(
    shard: typing.Callable[[typing.Any], typing.Any],
) -> None:
    check_as_plain(Mixing, shard)


def test_a_module_without_others_inside_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function of torch is looked at where nothing is lent: so it is on XLA for all modules."""
    monkeypatch.delattr(StandIns, "__torch_function__")
    model = materialize(on_meta(lambda: nn.Linear(3, 3)))
    assert not model.weight.is_meta


def test_only_touched_tensors_are_whole() -> None:
    """One at a time, also where a module writes all that is in a model."""
    with_memory: list[int] = []

    def count(params: list[nn.Parameter]) -> None:
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - to look does not touch
            with_memory.append(sum(p.untyped_storage().nbytes() > 0 for p in params))

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

        def init_weights(self) -> None:
            params = list(self.parameters())
            count(params)
            for param in params:
                nn.init.trunc_normal_(param.data)
                count(params)

        def forward(self, x: Tensor) -> Tensor:
            return x

    mesh, _ = recording_mesh((2,))
    materialize(fully_shard(on_meta(Wide), mesh))
    assert with_memory == [0] + [1] * 10


def test_what_is_kept_of_a_stand_in_can_be_printed() -> None:
    kept: list[Tensor] = []

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def reset_parameters(self) -> None:
            kept.extend([self.linear.weight, self.linear.weight.data])
            assert "2" in repr(self.linear.weight)

    materialize(on_meta(Keeps))
    assert all(repr(tensor) for tensor in kept)
