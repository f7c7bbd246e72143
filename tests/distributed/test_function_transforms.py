"""Transforms of `torch.func` over sharded models, beside the same over plain ones."""

from __future__ import annotations

import copy
import math
import typing
import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx

from recording import recording_mesh
from reference import Differences, assert_within, full, make_mesh
from shardkit import MixedPrecisionPolicy, fully_shard
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = [
    pytest.mark.helpers,
    pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning"),
]
TOLERANCE = 1e-12

Results = list[Tensor]


def draw(seed: int) -> Tensor:
    return torch.randn(5, 3, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


X, V = draw(1), draw(2)


def wholes(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(param).detach() for name, param in model.named_parameters()}


def grads_of(model: nn.Module) -> Results:
    return [param.grad for param in model.parameters()]


# --- values given to a forward --------------------------------------------------------------------


def computed_of_parameters(model: nn.Module, x: Tensor) -> Results:
    out = functional_call(model, {n: p * 2 for n, p in model.named_parameters()}, (x,))
    out.square().sum().backward()
    return grads_of(model)


def plain_values(model: nn.Module, x: Tensor) -> Results:
    given = {n: value.requires_grad_() for n, value in wholes(model).items()}
    out = functional_call(model, given, (X,))
    results = [out, *torch.autograd.grad(out.square().sum(), list(given.values()))]
    functional_call(model, given, (x,))
    return results


def own_parameters(model: nn.Module, x: Tensor) -> Results:
    given = dict(model.named_parameters())
    functional_call(model, given, (x,)).square().sum().backward()
    assert all(param is given[name] for name, param in model.named_parameters())
    return grads_of(model)


def some_values(model: nn.Module, x: Tensor) -> Results:
    given = {"0.weight": wholes(model)["0.weight"] * 2}
    functional_call(model, given, (x,)).square().sum().backward()
    return grads_of(model)


def called_amid_a_step(model: nn.Module, x: Tensor) -> Results:
    """Between a forward and its backward."""
    out = model(x)
    functional_call(model, {n: value * 3 for n, value in wholes(model).items()}, (x,))
    out.square().sum().backward()
    return grads_of(model)


def adapted(model: nn.Module, x: Tensor) -> Results:
    """MAML: a step of gradient descent that is differentiated."""
    params = dict(model.named_parameters())
    inner = functional_call(model, params, (X,)).square().mean()
    grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
    functional_call(model, fast, (x,)).square().mean().backward()
    return grads_of(model)


def adapted_to_two_tasks(model: nn.Module, x: Tensor) -> Results:
    """MAML: both tasks begin with the same dict, which keeps the parameters."""
    params = dict(model.named_parameters())
    losses: Results = []
    for task in range(2):
        inner = (functional_call(model, params, (X,)) - task).square().mean()
        assert all(param is params[name] for name, param in model.named_parameters())
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
        losses.append((functional_call(model, fast, (x,)) - task).square().mean())
    sum(losses, torch.zeros(())).backward()
    return grads_of(model)


# --- transforms -----------------------------------------------------------------------------------


def of_inputs(model: nn.Module, x: Tensor) -> Results:
    out, back = vjp(model, X)
    results = [out, *back(torch.ones_like(out)), *jvp(model, (X,), (V,))]
    results += [jacrev(model)(X[0]), jacfwd(model)(X[0])]
    results.append(hessian(lambda each: model(each).square().sum())(X[0]))
    model(x).square().sum().backward()
    return results + grads_of(model)


def of_batches(model: nn.Module, x: Tensor) -> Results:
    vmap(model)(x).square().sum().backward()
    return grads_of(model)


def of_batches_while_frozen(model: nn.Module, x: Tensor) -> Results:
    """As torchrl estimates the values of states."""
    model.requires_grad_(requires_grad=False)
    out = vmap(model)(X)
    model.requires_grad_(requires_grad=True)
    vmap(model)(x).square().sum().backward()
    return [out, *grads_of(model)]


def put_back(model: nn.Module, x: Tensor) -> Results:
    """As tensordict swaps parameters for a forward, and then restores them."""
    own = [(module, dict(module._parameters)) for module in model.modules()]  # noqa: SLF001
    out = model(x)
    for module, params in own:
        module._parameters.update(params)  # noqa: SLF001
    out.square().sum().backward()
    return grads_of(model)


def equation(model: nn.Module, x: Tensor) -> Results:
    """As for differential equations: derivatives by inputs are trained on."""
    slope = vmap(grad(lambda each: model(each).sum()))(x)
    (slope.square().sum() + model(x).sum()).backward()
    return grads_of(model)


def of_parameters(model: nn.Module, x: Tensor) -> Results:
    values = wholes(model)

    def loss_of(given: dict[str, Tensor], each: Tensor) -> Tensor:
        return functional_call(model, given, (each,)).square().sum()

    per_sample = vmap(grad(loss_of), in_dims=(None, 0))(values, X)
    along = jvp(lambda given: loss_of(given, X), (values,), (values,))
    bias = hessian(lambda each: loss_of({**values, "2.bias": each}, X))(values["2.bias"])
    model(x).square().sum().backward()
    return [*per_sample.values(), *along, bias, *grads_of(model)]


def ensemble(model: nn.Module, x: Tensor) -> Results:
    twins = [copy.deepcopy(MODEL).double() for _ in range(2)]
    params, _ = stack_module_state(twins)
    out = vmap(lambda given: functional_call(model, given, (X,)))(params)
    model(x).square().sum().backward()
    return [out, *grads_of(model)]


def forward_mode(model: nn.Module, x: Tensor) -> Results:
    with fwd.dual_level():
        out = model(fwd.make_dual(X.clone().requires_grad_(), V))
        tangent = fwd.unpack_dual(out).tangent
    model(x).square().sum().backward()
    return [tangent, *grads_of(model)]


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
USES: dict[str, Callable[[nn.Module, Tensor], Results]] = {
    use.__name__: use
    for use in (
        computed_of_parameters,
        plain_values,
        own_parameters,
        some_values,
        called_amid_a_step,
        adapted,
        adapted_to_two_tasks,
        of_inputs,
        of_batches,
        of_batches_while_frozen,
        put_back,
        equation,
        of_parameters,
        ensemble,
        forward_mode,
    )
}


def compare(mesh_shape: tuple[int, ...], name: str, is_apart: bool) -> Differences:
    """Compare what comes out with a plain model's: results, and the mean of the gradients."""
    plain, mesh = copy.deepcopy(MODEL).double(), make_mesh(mesh_shape)
    model = copy.deepcopy(plain)
    if is_apart:
        fully_shard(model[0], mesh)
    fully_shard(model, mesh)
    differences, ranks = Differences(), range(dist.get_world_size())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (DeprecationWarning, FutureWarning):  # Up to torch 2.14, and from 2.15 on.
            warnings.filterwarnings("ignore", "`torch.jit.script`", kind)
        for step in range(2):
            found = [full(each) for each in USES[name](model, draw(10 * step + dist.get_rank()))]
            for rank in ranks:
                wanted = USES[name](plain, draw(10 * step + rank))
            for param in plain.parameters():
                if param.grad is not None:
                    param.grad /= len(ranks)  # In place: it is among the results.
            for each, other in zip(found, wanted, strict=True):
                differences.note("result", each, other)
            differences.note_grads(model, plain)
            model(X).sum().backward()
            plain(X).sum().backward()
            differences.note_grads(model, plain)
            for each in (model, plain):
                each.zero_grad()
    assert model.memory_stats()["unsharded_nbytes"] == 0
    return differences


@pytest.mark.parametrize("name", USES)
def test_results_are_those_of_a_plain_model(spawn: Spawn, name: str) -> None:
    by_rank = spawn(compare, 2, (2,), name, True)
    assert_within(by_rank, result=TOLERANCE, grad=TOLERANCE)


@pytest.mark.parametrize(
    "name", ["adapted", "adapted_to_two_tasks", "own_parameters", "of_inputs", "put_back"]
)
def test_with_one_group(spawn: Spawn, name: str) -> None:
    by_rank = spawn(compare, 2, (2,), name, False)
    assert_within(by_rank, result=TOLERANCE, grad=TOLERANCE)


def forward_mode_slopes(model: nn.Module, x: Tensor) -> Tensor:
    with fwd.dual_level():
        return fwd.unpack_dual(model(fwd.make_dual(x, V))).tangent.square().sum()


def forward_mode_slopes_and_values(model: nn.Module, x: Tensor) -> Tensor:
    with fwd.dual_level():
        out, slope = fwd.unpack_dual(model(fwd.make_dual(x, V)))
        return slope.square().sum() + out.square().sum()


def forward_mode_slopes_before_a_forward(model: nn.Module, x: Tensor) -> Tensor:
    return forward_mode_slopes(model, x) + model(2 * x).square().sum()


def slopes_before_a_forward(model: nn.Module, x: Tensor) -> Tensor:
    slope = vmap(grad(lambda each: model(each).sum()))(x)
    return slope.square().sum() + model(x).square().sum()


def slopes_after_a_forward(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum() + jvp(model, (x,), (V,))[1].square().sum()


def train_on_slopes(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> Differences:
    """Train a model of several groups, and differentiate the loss by the inputs as well."""
    torch.manual_seed(0)
    plain = nn.Sequential(*MODEL[:2], nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plain, mesh = copy.deepcopy(plain), make_mesh((2,))
    model = copy.deepcopy(plain)
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh)
    differences = Differences()
    for step in range(2):
        losses, by_input = [], []
        for each in (model, plain):
            x = draw(step).requires_grad_()
            losses.append(loss_of(each, x))
            losses[-1].backward()
            by_input += [x.grad, *torch.autograd.grad(loss_of(each, x), x)]
        differences.note("result", *losses)
        for one, other in zip(by_input[:2], by_input[2:], strict=True):
            differences.note("result", one, other)
        differences.note_grads(model, plain)
        model(X).sum().backward()
        plain(X).sum().backward()
        differences.note_grads(model, plain)
    assert model.memory_stats()["unsharded_nbytes"] == 0
    return differences


@pytest.mark.parametrize(
    "loss_of",
    [
        forward_mode_slopes,
        forward_mode_slopes_and_values,
        forward_mode_slopes_before_a_forward,
        slopes_before_a_forward,
        slopes_after_a_forward,
    ],
)
def test_losses_of_slopes(spawn: Spawn, loss_of: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Their backwards read layers that shardkit does not see them enter."""
    by_rank = spawn(train_on_slopes, 2, loss_of)
    assert_within(by_rank, result=TOLERANCE, grad=TOLERANCE)


@pytest.mark.parametrize("mesh_shape", [(1,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["adapted", "of_inputs", "of_parameters", "equation"])
def test_on_other_meshes(spawn: Spawn, name: str, mesh_shape: tuple[int, ...]) -> None:
    by_rank = spawn(compare, math.prod(mesh_shape), mesh_shape, name, True)
    assert_within(by_rank, result=TOLERANCE, grad=TOLERANCE)


ALL = tuple(name for name, _ in MODEL.named_parameters())


def logged(names: tuple[str, ...], kind: str) -> list[tuple[str, int]]:
    """Return the gathers of a forward that is given values by these names."""
    mesh, log = recording_mesh((2,))
    model = copy.deepcopy(MODEL)
    whole = {name: param.detach() for name, param in model.named_parameters()}
    fully_shard(model[0], mesh)
    fully_shard(model, mesh)
    x = torch.ones(1, 3)
    model(x).sum().backward()
    given = {name: whole[name] for name in names}
    log.clear()
    if kind == "transform":
        jvp(lambda x: functional_call(model, given, (x,)), (x,), (x,))
    elif kind == "raises":
        with pytest.raises(RuntimeError):
            functional_call(model, given, (torch.ones(1, 4),))
    else:
        functional_call(model, given, (x,)).sum()
    gathers = [each for each in log if each[0] == "start all_gather"]
    model(x).sum().backward()
    assert model.memory_stats()["unsharded_nbytes"] == 0
    return gathers


@pytest.mark.parametrize("kind", ["forward", "transform", "raises"])
def test_what_is_given_is_not_gathered(kind: str) -> None:
    assert logged(ALL, kind) == []
    assert len(logged(ALL[:2], "forward")) == len(logged((), "forward")) - 1
    assert logged(ALL[:1], "forward") == logged((), "forward") != []


def nbytes_after_a_functional_call() -> int:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    given = {name: param * 2 for name, param in model.named_parameters()}
    functional_call(model, given, (torch.ones(5, 3),)).sum().backward()
    return model.memory_stats()["unsharded_nbytes"]


def test_memory_that_a_functional_call_did_not_need_is_freed(spawn: Spawn) -> None:
    assert spawn(nbytes_after_a_functional_call, 2) == [0, 0]


def values_given_twice(reshard_after_forward: bool | None) -> list[bool]:
    """What is given stays the caller's: functional_call writes what modules hold into its dict."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    for module in (model[0], model):
        fully_shard(module, reshard_after_forward=reshard_after_forward)
    wholes = [model[i].bias.full_tensor().detach().requires_grad_() for i in range(2)]
    given = {f"{i}.bias": whole for i, whole in enumerate(wholes)}
    for _ in range(2):
        functional_call(model, given, (torch.ones(5, 3),)).sum().backward()
    return [given[f"{i}.bias"] is whole for i, whole in enumerate(wholes)]


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_what_is_given_stays_the_callers(spawn: Spawn, reshard_after_forward: bool | None) -> None:
    assert spawn(values_given_twice, 2, reshard_after_forward) == [[True, True]] * 2


@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize("num_given", [1, 4])
@on_ranks(2)
def test_a_call_while_parameters_are_shown(num_given: int, is_changed: bool) -> None:
    """While a kept root shows unsharded parameters, which functional_call puts back."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()
    model = copy.deepcopy(plain)
    fully_shard(model[0])
    fully_shard(model)
    wholes = {n: p.full_tensor().detach() * 2 for n, p in model.named_parameters()}
    out = model(X)
    if is_changed:
        with torch.no_grad():
            for each in (model[0], plain[0]):
                each.bias.add_(1)
    functional_call(model, dict([*wholes.items()][-num_given:]), (X,))
    differences = Differences()
    differences.note_parameters(copy.deepcopy(model), plain)
    (model(X) if is_changed else out).sum().backward()
    plain(X).sum().backward()
    differences.note_grads(model, plain)
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    assert model.memory_stats()["unsharded_nbytes"] == 0
    assert_within([differences], grad=TOLERANCE, parameter=TOLERANCE)


def half() -> tuple[torch.dtype, float]:
    """What is given is computed with in the compute dtype, as the parameters are."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(3, 2, bias=False), mp_policy=policy)
    given = {"weight": torch.ones(2, 3, requires_grad=True)}
    out = functional_call(model, given, (torch.ones(1, 3),))
    out.sum().backward()
    return out.dtype, given["weight"].grad.sum().item()


def test_given_values_are_cast(spawn: Spawn) -> None:
    assert spawn(half, 2) == [(torch.bfloat16, 6.0)] * 2


def sharded_in_a_transform() -> None:
    model = fully_shard(nn.Linear(3, 2))
    loss = lambda given: functional_call(model, given, (torch.ones(1, 3),)).sum()  # noqa: E731
    grad(loss)(dict(model.named_parameters()))


def test_a_transform_by_sharded_values_is_refused_with_the_line(spawn_errors: Spawn) -> None:
    for error in spawn_errors(sharded_in_a_transform, 2):
        assert error.type_name == "StateError"
        assert "got the sharded 'weight'" in error.message
        assert "{name: param.full_tensor().detach() for name, param in" in error.message


def linearized() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    linearize(model, X.float())


def traced_by_operators() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    make_fx(model)(X.float())


@pytest.mark.parametrize("call", [linearized, traced_by_operators])
def test_a_trace_of_operators_is_refused(spawn_errors: Spawn, call: Callable[[], None]) -> None:
    """It would hold how parameters were gathered, and from where."""
    for error in spawn_errors(call, 2):
        assert error.type_name == "StateError"
        assert "make_fx" in error.message
        assert "torch.func.jvp" in error.message


def twice_differentiable() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 2), nn.Tanh()))
    model(torch.ones(1, 3)).sum().backward(create_graph=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_that_makes_a_graph_is_refused(spawn_errors: Spawn, world_size: int) -> None:
    for error in spawn_errors(twice_differentiable, world_size):
        assert error.type_name == "StateError"
        assert "backward(create_graph=True) made the gradient of parameter '0." in error.message
        assert "torch.autograd.grad(loss, list(model.parameters()), create_graph=True)" in (
            error.message
        )


def replaced_by_hand() -> None:
    model = fully_shard(nn.Linear(3, 2))
    model.weight = nn.Parameter(torch.ones(2, 3))
    model(torch.ones(1, 3))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.triu()


def parametrized_too_late() -> None:
    """`parametrize` swaps the sharded parameter and the plain result of `right_inverse`."""
    model = fully_shard(nn.Linear(3, 3))
    nn.utils.parametrize.register_parametrization(model, "weight", Symmetric())
    model(torch.ones(1, 3))


@pytest.mark.parametrize("replace", [replaced_by_hand, parametrized_too_late])
def test_a_parameter_replaced_by_hand_is_refused_as_before(
    spawn_errors: Spawn, replace: Callable[[], None]
) -> None:
    for error in spawn_errors(replace, 2):
        assert "FSDPLinear is no longer the parameter '" in error.message


class Hidden(nn.Linear):
    def forward(self, x: Tensor) -> typing.Any:
        return super().forward(x).detach()


def warnings_of_a_forward_without_outputs() -> list[str]:
    model = fully_shard(Hidden(3, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(1, 3))
    return [f"{each.filename.rsplit('/', 1)[-1]}: {each.message}" for each in caught]


def test_a_warning_points_at_the_users_line_on_one_rank(spawn: Spawn) -> None:
    [said], others = spawn(warnings_of_a_forward_without_outputs, 2)
    assert said.startswith("test_function_transforms.py: forward of 'the root' ran with")
    assert others == []


class Twice(nn.Module):
    """A model that runs a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.first(x).tanh()).tanh())


@pytest.mark.parametrize("given", [["first.weight"], ["last.bias", "first.bias"]], ids=str)
@pytest.mark.parametrize("how", ["resharded", "kept", "list"])
@on_ranks(2)
def test_a_layer_may_run_twice_in_a_functional_call(how: str, given: list[str]) -> None:
    plain, mesh = Twice().double(), make_mesh((dist.get_world_size(),))
    model: typing.Any = copy.deepcopy(plain)
    layers = [model.first, model.last]
    for each in (*([layers] if how == "list" else layers), model):
        fully_shard(each, mesh, reshard_after_forward=how != "kept")
    values = {n: torch.full_like(p, 0.1) for n, p in plain.named_parameters() if n in given}
    differences = Differences()
    for _ in range(2):
        for each in (plain, model):
            functional_call(each, values, (X,)).sum().backward()
        differences.note("result", model(X), plain(X))
        for each in (plain, model):
            each(X).square().sum().backward()
        differences.note_grads(model, plain)
    assert_within([differences], result=TOLERANCE, grad=TOLERANCE)
