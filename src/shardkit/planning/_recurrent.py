"""Recurrent layers on meta as the CPU computes them: torch takes other steps for meta tensors.

The CPU multiplies all inputs of a layer at once (ATen/native/RNN.cpp). It computes LSTMs of fp32
and bf16 in oneDNN, whose workspace is kept for the backward (mkldnn/RNN.cpp). The sizes are those
of oneDNN 3.10 to 3.13, which torch 2.11 to 2.15 have, with AVX-512 and without AMX.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardkit._compat.torch_modules import replace_recurrences
from shardkit._layout import align_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    State = tuple[Tensor, ...]

_LINE, _PAGE = 64, 4096
_OF_ONEDNN = (torch.float32, torch.bfloat16)


class _Weights(NamedTuple):
    """Weights of a layer in one direction: of its inputs, of its state, and of a projection."""

    inputs: Tensor
    state: Tensor
    input_bias: Tensor | None
    state_bias: Tensor | None
    projection: Tensor | None


def recurrent_layers() -> AbstractContextManager[object]:
    """Compute `nn.LSTM`, `nn.GRU` and `nn.RNN` on meta as the CPU does.

    Meanwhile the functions that these modules call are replaced. Packed sequences are computed as
    torch does.
    """
    cells = {
        "lstm": _lstm_cell,
        "gru": _gru_cell,
        "rnn_tanh": functools.partial(_plain_cell, torch.tanh),
        "rnn_relu": functools.partial(_plain_cell, torch.relu),
    }
    return replace_recurrences({name: functools.partial(_run, own) for name, own in cells.items()})


def _run(cell: Any, original: Callable[..., Any], x: Tensor, state: Any, *args: Any) -> Any:
    """Return the results of all layers, and their last states."""
    if not isinstance(args[0], list):
        return original(x, state, *args)  # The sizes of a packed sequence come before its state.
    weights, has_biases, num_layers, dropout, is_training, is_bidirectional, batch_first = args
    states = state if isinstance(state, tuple) else (state,)
    num_directions = 2 if is_bidirectional else 1
    x = x.transpose(0, 1) if batch_first else x
    num = len(weights) // (num_layers * num_directions)
    own = [_split(weights[i : i + num], has_biases) for i in range(0, len(weights), num)]
    layer: Any = functools.partial(_stepwise, cell)
    if cell is _lstm_cell and x.dtype in _OF_ONEDNN and own[0].projection is None:
        x, layer = x.contiguous(), _in_onednn
    firsts = [*zip(*(each.unbind(0) for each in states), strict=True)]
    lasts: list[State] = []
    for number in range(num_layers):
        outputs = []
        for direction in range(num_directions):
            index, steps = len(lasts), None
            output, last, steps = layer(x, firsts[index], own[index], is_reversed=direction > 0)
            outputs.append(output)
            lasts.append(last)
        x = torch.cat(outputs, -1) if is_bidirectional else output
        del outputs, output, steps
        if dropout and is_training and number < num_layers - 1:
            x = F.dropout(x, dropout)
    stacked = [torch.stack(parts) for parts in zip(*lasts, strict=True)]
    return (x.transpose(0, 1) if batch_first else x, *stacked)


def _split(weights: list[Tensor], has_biases: bool) -> _Weights:  # noqa: FBT001
    inputs, state, *others = weights
    input_bias, state_bias = others[:2] if has_biases else (None, None)
    projection = others[2 if has_biases else 0 :]
    return _Weights(inputs, state, input_bias, state_bias, next(iter(projection), None))


# --- one step after the other ---------------------------------------------------------------------


def _stepwise(
    cell: Any, x: Tensor, state: State, weights: _Weights, *, is_reversed: bool
) -> tuple[Tensor, State, object]:
    """Return the results of a layer in one direction, its last state, and products of its inputs.

    torch keeps the latter until it has put both directions together.
    """
    steps = F.linear(x, weights.inputs, weights.input_bias).unbind(0)
    outputs = []
    for step in reversed(steps) if is_reversed else steps:
        state = cell(step, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if is_reversed else outputs), state, steps


def _plain_cell(function: Any, step: Tensor, state: State, weights: _Weights) -> State:
    return (function(F.linear(state[0], weights.state, weights.state_bias).add_(step)),)


def _gru_cell(step: Tensor, state: State, weights: _Weights) -> State:
    (hidden,) = state
    own = torch.unsafe_chunk(F.linear(hidden, weights.state, weights.state_bias), 3, 1)
    given = torch.unsafe_chunk(step, 3, 1)
    reset, update = (own[i].add_(given[i]).sigmoid_() for i in (0, 1))
    new = given[2].add(own[2].mul_(reset)).tanh_()
    return ((hidden - new).mul_(update).add_(new),)


def _lstm_cell(step: Tensor, state: State, weights: _Weights) -> State:
    hidden, cell = state
    gates = F.linear(hidden, weights.state, weights.state_bias).add_(step)
    chunks = torch.unsafe_chunk(gates, 4, 1)
    entered, forgot = chunks[0].sigmoid_(), chunks[1].sigmoid_()
    new, shown = chunks[2].tanh_(), chunks[3].sigmoid_()
    cell = (forgot * cell).add_(entered * new)
    hidden = shown * cell.tanh()
    if weights.projection is not None:
        hidden = hidden.matmul(weights.projection.t())
    return hidden, cell


# --- LSTMs of oneDNN ------------------------------------------------------------------------------


def _in_onednn(
    x: Tensor, state: State, weights: _Weights, *, is_reversed: bool
) -> tuple[Tensor, State, object]:
    """Return the same, from the other library; both directions take the same memory."""
    del is_reversed
    own = [*weights[:4]]
    if weights.input_bias is None:  # Then torch passes zeros, as many as weights.
        own[2:] = torch.zeros_like(weights.inputs), torch.zeros_like(weights.state)
    compute: Any = _OneDnnLstm.apply
    output, *last = compute(torch.is_grad_enabled(), x, *state, *own)
    return output, tuple(last), None


class _OneDnnLstm(torch.autograd.Function):
    """A layer in one direction: its products, and the memory that oneDNN takes for it."""

    @staticmethod
    def forward(ctx: Any, is_kept: bool, *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: FBT001
        x, hidden, cell, of_inputs, of_state, *_ = inputs
        for _ in range(len(x)):
            torch.mm(x[0], of_inputs.t())
            torch.mm(hidden, of_state.t())
        output = x.new_empty(*x.shape[:2], hidden.shape[-1])
        results = output, torch.empty_like(hidden), torch.empty_like(cell)
        scratch = [x.new_empty(len(of_inputs))]  # Of both biases.
        if is_kept:
            workspace = _bytes(x, _workspace_nbytes(x, hidden))
            ctx.save_for_backward(*inputs, *results, workspace)
        scratch += _packed_and_sums(x, hidden, (of_inputs, of_state), x.itemsize)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, cell, of_inputs, of_state, *_ = ctx.saved_tensors
        for _ in range(len(x)):
            gates = x.new_empty(x.shape[1], len(of_inputs))
            for each, weight in ((x[0], of_inputs), (hidden, of_state)):
                torch.mm(gates, weight)
                torch.mm(gates.t(), each)
            del gates
        scratch = [grad.contiguous() for grad in grads]
        scratch.append(x.new_empty(len(of_inputs)))
        bias = of_inputs.new_empty(len(of_inputs))
        results = [_in_fp32(each) for each in (x, hidden, cell, of_inputs, of_state, bias, bias)]
        if x.dtype == torch.float32:  # Rows of a length that the cache does not like.
            odd = [w for w in (of_inputs, of_state) if _pitch(w.shape[1], 4) != 4 * w.shape[1]]
            scratch += [_bytes(x, len(w) * _pitch(w.shape[1], 4)) for w in odd]
        else:
            scratch += map(_in_fp32, grads)
            scratch += map(torch.empty_like, (of_inputs, of_state))
        scratch += _packed_and_sums(x, hidden, (of_inputs, of_state), 4)
        del scratch
        for index, each in enumerate(results):
            results[index] = each.to(x.dtype)
        return None, *results


def _packed_and_sums(
    x: Tensor, hidden: Tensor, weights: tuple[Tensor, ...], itemsize: int
) -> list[Tensor]:
    """Return what both passes take: weights or their gradients in oneDNN's format, and sums."""
    packed = [_bytes(x, each.shape[1] * _pitch(len(each), itemsize)) for each in weights]
    return [*packed, _bytes(x, _scratch_nbytes(x, hidden))]


def _in_fp32(tensor: Tensor) -> Tensor:
    """Return a new tensor of the same shape, in fp32."""
    return torch.empty_like(tensor, dtype=torch.float32)


def _bytes(like: Tensor, nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=like.device)


def _pitch(num: int, itemsize: int) -> int:
    """Return the bytes of a row: whole lines of the cache, and not 256 elements or a multiple."""
    padded = align_up(num, _LINE // itemsize)
    return itemsize * (padded if padded % 256 else padded + _LINE // itemsize)


def _workspace_nbytes(x: Tensor, hidden: Tensor) -> int:
    """Return the bytes of gates, of states, and of gradients of states, for all steps."""
    (length, num_rows, num_inputs), size, itemsize = x.shape, hidden.shape[-1], x.itemsize
    of_gates = length * num_rows * _pitch(4 * size, itemsize)
    wide = max(num_inputs, size)
    of_layer = 2 * _pitch(wide, itemsize) + 4 * _pitch(wide, 4)
    of_states = 3 * _pitch(size, itemsize) + 2 * _pitch(size, 4)
    return of_gates + (length + 1) * num_rows * (of_layer + of_states) + 4 * _PAGE


def _scratch_nbytes(x: Tensor, hidden: Tensor) -> int:
    """Return the bytes of sums before they become gates: of all steps in fp32, of one in bf16."""
    size, is_fp32 = hidden.shape[-1], x.dtype == torch.float32
    num_rows = x.shape[1] * (len(x) if is_fp32 else 1)
    return num_rows * (_pitch(4 * size, 4) + (0 if is_fp32 else 6 * size)) + 5 * _PAGE
