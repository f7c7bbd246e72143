"""An unsharded parameter kept after its memory was given back raises, by name; it never crashes."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.nn.functional as F
from recorded import Recorded
from torch import Tensor, nn

from recording import recording_mesh
from shardkit import FreedParameterError, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable

X = torch.ones(8, 8)
NAME = "layers.0.linear.weight"


def keep_weights(recorded: Recorded) -> list[Tensor]:
    """Run a forward; return the weights that the layers saw in it."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: object) -> None:
        del args
        kept.append(module.weight)

    handles = [layer.linear.register_forward_pre_hook(keep) for layer in recorded.model.layers]
    recorded.run().backward()
    for handle in handles:
        handle.remove()
    return kept


@pytest.fixture
def freed() -> Tensor:
    """Return the weight of layer 0, 8 x 8, after the step that it was gathered for."""
    return keep_weights(Recorded())[0]


USES: dict[str, Callable[[Tensor], object]] = {
    "sum": torch.sum,
    "times": lambda p: p * 2,
    "times from the right": lambda p: 2 * p,
    "clone": torch.clone,
    "matmul": lambda p: p @ X,
    "matmul from the right": lambda p: X @ p,
    "linear": lambda p: F.linear(X, p),
    "no grad": lambda p: torch.no_grad()(p.sum)(),
    "detach": torch.detach,
    "index": lambda p: p[0, 0],
    "item": lambda p: p.max().item(),
    "numpy": Tensor.numpy,
    "tolist": Tensor.tolist,
    "in place": lambda p: p.add_(1),
    "copy from": lambda p: X.clone().copy_(p),
    "view": lambda p: p.view(-1),
    "to": lambda p: p.to(torch.float64),
    "compare": lambda p: p == X,
    "norm": torch.linalg.vector_norm,
    "pointer": lambda p: p.data_ptr(),
    "new": torch.zeros_like,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_a_freed_parameter_raises_its_name(
    freed: Tensor, use: Callable[[Tensor], object]
) -> None:
    with pytest.raises(FreedParameterError) as caught:
        use(freed)
    message = str(caught.value)
    assert message.startswith(f"unsharded parameter '{NAME}' is used outside its module's forward")
    assert "module.parameters()" in message
    assert "unshard()" in message


HIDDEN_USES: dict[str, Callable[[Tensor], object]] = {
    "in a list": lambda p: torch.cat([X, p]),
    "by name": lambda p: torch.add(input=X, other=p),
    "as out": lambda p: torch.add(X, 1, out=p),
    "foreach": lambda p: torch._foreach_mul([p], 2),  # noqa: SLF001
}


@pytest.mark.parametrize("use", HIDDEN_USES.values(), ids=HIDDEN_USES)
def test_a_freed_parameter_among_others_raises(
    freed: Tensor, use: Callable[[Tensor], object]
) -> None:
    with pytest.raises(FreedParameterError):
        use(freed)


@pytest.mark.parametrize("use", HIDDEN_USES.values(), ids=HIDDEN_USES)
def test_a_freed_parameter_among_others_raises_its_name(
    freed: Tensor, use: Callable[[Tensor], object]
) -> None:
    with pytest.raises(FreedParameterError, match=NAME):
        use(freed)


# Each returns a plain tensor without memory: the next operator on it can kill the process, so the
# tests stop here.
@pytest.mark.parametrize("attribute", ["data", "T", "mT", "H"])
def test_an_attribute_that_is_a_tensor_raises(freed: Tensor, attribute: str) -> None:
    with pytest.raises(FreedParameterError, match=NAME):
        getattr(freed, attribute)


def test_a_copy_of_a_freed_parameter_raises(freed: Tensor) -> None:
    with pytest.raises(FreedParameterError, match=NAME):
        copy.deepcopy(freed)


def test_what_needs_no_memory_can_be_asked(freed: Tensor) -> None:
    assert freed.shape == (8, 8)
    assert freed.dtype == torch.float32
    assert freed.device == torch.device("cpu")
    assert freed.requires_grad
    assert freed.is_leaf
    assert freed.grad is None
    assert freed.ndim == 2
    assert hash(freed) == hash(freed)


@pytest.mark.parametrize("ask", [repr, len, torch.numel, torch.is_floating_point])
def test_more_that_needs_no_memory_can_be_asked(
    freed: Tensor, ask: Callable[[Tensor], object]
) -> None:
    ask(freed)


def test_all_layers_are_guarded_after_a_step() -> None:
    """Also the last one, which stays between forward and backward."""
    for index, weight in enumerate(keep_weights(Recorded())):
        with pytest.raises(FreedParameterError, match=rf"'layers\.{index}\.linear\.weight'"):
            weight.sum()


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_between_forward_and_backward_only_what_is_kept_can_be_used(
    *, reshard_after_forward: bool
) -> None:
    recorded = Recorded(reshard_after_forward=reshard_after_forward)
    kept: list[Tensor] = []
    first = recorded.model.layers[0].linear
    first.register_forward_pre_hook(lambda module, args: kept.append(module.weight))  # noqa: ARG005
    recorded.run()
    if reshard_after_forward:
        with pytest.raises(FreedParameterError, match=NAME):
            kept[0].sum()
    else:
        assert kept[0].sum().isfinite()


def test_in_the_next_forward_a_kept_parameter_can_be_used_again() -> None:
    """It is the same object every time, so a reference to it is good while its module runs."""
    recorded = Recorded()
    [weight, *_] = keep_weights(recorded)
    [again, *_] = keep_weights(recorded)
    assert again is weight
    sums = []
    first = recorded.model.layers[0].linear
    first.register_forward_pre_hook(lambda module, args: sums.append(weight.sum()))  # noqa: ARG005
    recorded.run().backward()
    assert len(sums) == 1
    with pytest.raises(FreedParameterError):
        weight.sum()


def test_around_unshard_a_parameter_can_be_used() -> None:
    recorded = Recorded()
    recorded.step()
    layer = recorded.model.layers[0]
    layer.unshard()
    weight = layer.linear.weight
    assert weight.sum().isfinite()
    layer.reshard()
    with pytest.raises(FreedParameterError, match=NAME):
        weight.sum()
    assert layer.linear.weight is not weight


def test_after_an_exception_nothing_is_left_to_use() -> None:
    recorded = Recorded()
    [weight, *_] = keep_weights(recorded)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        recorded.model(torch.ones(2, 5))
    recorded.run().backward()
    with pytest.raises(FreedParameterError, match=NAME):
        weight.sum()


def test_a_name_is_that_seen_from_the_root() -> None:
    """It has another until the root's first forward."""
    recorded = Recorded()
    layer = recorded.model.layers[1]
    layer.unshard()
    weight = layer.linear.weight
    layer.reshard()
    with pytest.raises(FreedParameterError, match=r"'linear\.weight'"):
        weight.sum()
    recorded.step()
    with pytest.raises(FreedParameterError, match=r"'layers\.1\.linear\.weight'"):
        weight.sum()


def test_on_one_rank_there_is_nothing_to_free() -> None:
    """The parameter seen in forward is the shard's own memory, which stays."""
    for weight in keep_weights(Recorded((1,))):
        assert weight.sum().isfinite()


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 8))

    def forward(self) -> Tensor:
        return self.weight.expand(4, 8)


class WithToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer, self.head = Token(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.cat([self.token(), x])))


@pytest.mark.parametrize("reshard", [None, False])
def test_a_forward_that_returns_its_parameter(*, reshard: bool | None) -> None:
    mesh, _ = recording_mesh((4,))
    model = WithToken()
    fully_shard(model.token, mesh, reshard_after_forward=reshard)
    fully_shard(model.layer, mesh)
    fully_shard(model, mesh)
    model(X).sum().backward()  # In a first pass its memory is still there.
    if reshard is None:
        with pytest.raises(
            FreedParameterError, match=r"token\.weight.* reshard_after_forward=False"
        ):
            model(X)
        return
    model(X).sum().backward()
    assert model.token.weight.grad is not None
