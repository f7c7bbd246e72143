"""shardkit in place of FSDP2 inside of Hugging Face transformers, which shards while it loads.

    import shardkit

    shardkit.install()
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    sizes = DistributedConfig(fsdp_size=8)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=sizes)

transformers makes the model on meta, shards it there, and fills it from the files. Each rank reads
only its pieces. Weights that are stored in another form are read whole, one parameter at a time,
unless their conversion keeps rows together (experts of most models): then the rows that hold the
piece are read.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import IntegrationError, warn_user
from shardkit._install import Installed, catch_up, install, once
from shardkit._tensor.client_answers import telling_the_truth
from shardkit._tensor.dcp_protocol import boxes_of_piece
from shardkit._tensor.sharded import ShardedTensor
from shardkit.integrations._tied_modules import tied_modules_together
from shardkit.integrations._versions import check_version, replacing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardkit._tensor.spec import ShardSpec

__all__ = ["use"]

_KEEP_ROWS: dict[str, Callable[[Any], bool]] = {
    "MergeModulelist": lambda op: op.dim == 0,
    "Concatenate": lambda op: op.dim > 0 and op.num_shards_attribute is None,
    "Interleave": lambda op: op.dim > 0,
    "Transpose": lambda op: min(op.dim0, op.dim1) > 0 and not op.check_dims,
}
"""Conversions of transformers, and when each row of their result comes from that row alone."""

_in_use: list[Installed] = []


def use() -> Installed:
    """Let ``from_pretrained(..., distributed_config=DistributedConfig(...))`` shard with shardkit.

    `shardkit.install` calls it, and it calls `shardkit.install`. A second call changes nothing.

    Returns:
        An object whose `undo()` restores transformers, as does the end of ``with use():``. Models
        that are sharded stay sharded.

    Raises:
        IntegrationError: transformers is older than the tested versions, or lacks what is replaced.
            Later, when a model is loaded: it is quantized.
    """
    check_version("transformers")
    return once(_in_use, _replace_all)


def _replace_all(used: Installed) -> None:
    used.at_undo(install().undo)
    used.after_import("transformers.core_model_loading", functools.partial(_read_pieces, used))
    used.after_import("transformers.modeling_utils", functools.partial(_keep_missing, used))
    used.after_import("transformers.distributed.mixin", functools.partial(_shard_tied, used))
    used.after_import("transformers.distributed.checkpoint", functools.partial(_save_pieces, used))


def _shard_tied(used: Installed, mixin: Any) -> None:
    """Tie the weights before transformers shards; it ties them after it has filled them."""
    with replacing("transformers"):
        from transformers.distributed import fsdp

        def shard(original: Any, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            if getattr(model, "is_quantized", False) and not _is_dequantized(model.config):
                msg = (
                    f"from_pretrained(distributed_config=...) loads a quantized "
                    f"{type(model).__name__}, and quantized weights are not read in parts. Load "
                    f"it without distributed_config, then call shardkit.fully_shard."
                )
                raise IntegrationError(msg)
            model.tie_weights(recompute_mapping=False)  # type: ignore[operator]  # Not tied so far.
            with tied_modules_together([model], fsdp):
                sharded: nn.Module = original(model, *args, **kwargs)
            return sharded

        used.wrap(mixin, "apply_fully_sharded_data_parallelism", shard)


def _is_dequantized(config: Any) -> bool:
    """Return whether quantized files are loaded into weights that are not quantized."""
    given = getattr(config, "quantization_config", None)
    if isinstance(given, dict):
        return bool(given.get("dequantize"))
    return bool(getattr(given, "dequantize", False))


def _save_pieces(used: Installed, checkpoint: Any) -> None:
    """Have pieces of strided parts saved as they are; transformers cuts DTensors otherwise."""
    with replacing("transformers"):
        used.replace(checkpoint, "is_dtensor", telling_the_truth(checkpoint.is_dtensor))


def _keep_missing(used: Installed, modeling: Any) -> None:
    """Let sharded parameters that the files lack stay; transformers then initializes them."""
    with replacing("transformers"):

        def load(original: Any, model: Any, param_name: str, tensor: Tensor) -> None:
            param = _held(model, param_name)
            if isinstance(param, ShardedTensor) and isinstance(tensor, ShardedTensor):
                param.replace_piece(tensor.local_piece)
            else:
                original(model, param_name, tensor)

        used.wrap(modeling, "_load_parameter_into_model", load)


def _held(model: nn.Module, name: str) -> Any:
    """Return the parameter or buffer of a name, or None."""
    path, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(path), attribute, None)


def _read_pieces(used: Installed, loading: Any) -> None:
    """Replace how transformers reads and sets the values of sharded parameters."""
    with replacing("transformers"):
        operation = loading.DtensorShardOperation
        transform = loading.WeightTransform

        def choose(param: Any) -> Any:
            return _PieceOperation(param) if isinstance(param, ShardedTensor) else operation(param)

        used.replace(loading, operation.__name__, choose)
        used.wrap(transform, "materialize_tensors", _reading)
        used.wrap(loading, "set_param_for_module", _setting)


class Stored:
    """Tensor in a file that a sharded parameter is filled from.

    Attributes:
        spec: Cut of the parameter.
        shape: Shape of the stored tensor.
        piece: This rank's piece of it; None: not read, as for a conversion.

    Args:
        source: The stored tensor, of which rows can be read: a slice of safetensors, or a tensor.
        dtype: Dtype to convert to.
    """

    def __init__(self, spec: ShardSpec, source: Any, dtype: torch.dtype) -> None:
        self.spec, self._source, self._dtype = spec, source, dtype
        is_tensor = isinstance(source, Tensor)
        self.shape = torch.Size(source.shape if is_tensor else source.get_shape())
        self.piece: Tensor | None = None

    def read(self, rows: slice | None = None) -> Tensor:
        """Return the tensor, or rows of it."""
        read: Tensor = self._source[...] if rows is None else self._source[rows]
        return read.to(self.spec.device, self._dtype)

    def read_piece(self) -> None:
        """Read this rank's piece, and keep it."""
        spec = self.spec
        if spec.packing is not None or spec.is_traced or not self.shape:
            self.piece = _own(spec.slice_full(self.read()))
            return
        self.piece = torch.empty(spec.piece_numel, dtype=self._dtype, device=spec.device)
        for box in boxes_of_piece(spec):
            ranges = zip(box.offsets, box.sizes, strict=True)
            read = self._source[tuple(slice(first, first + size) for first, size in ranges)]
            self.piece[box.start : box.stop].view(box.sizes).copy_(read)


class _PieceOperation:
    """In place of transformers' ``DtensorShardOperation``: it reads for a sharded parameter.

    Args:
        param: The parameter, as `model.state_dict()` gives it.
    """

    def __init__(self, param: ShardedTensor) -> None:
        self._spec, self._dtype = param.spec, param.dtype

    def shard_tensor(
        self,
        source: Any,
        tensor_idx: int | None = None,
        device: object = None,
        dtype: torch.dtype | None = None,
    ) -> Stored:
        """Return the stored tensor, with this rank's piece if that is all that is needed.

        Threads of transformers call it in advance. What is converted is read when it is its turn.
        """
        del device  # Pieces may lie elsewhere, as on the host.
        stored = Stored(self._spec, source, dtype or self._dtype)
        if tensor_idx is None and stored.shape == tuple(self._spec.shape):
            stored.read_piece()
        return stored


def _own(piece: Tensor) -> Tensor:
    """Return a piece in memory of its own, without the rest of what was read."""
    return piece.clone(memory_format=torch.contiguous_format)


# --- conversions ----------------------------------------------------------------------------------


def _reading(original: Callable[..., dict[str, list[Any]]], self: Any) -> dict[str, list[Any]]:
    """Wrap what collects a conversion's tensors: those of sharded parameters are read now."""
    collected = original(self)
    stored = [each for tensors in collected.values() for each in tensors]
    is_converted = hasattr(self, "operations")  # Otherwise its piece has been read.
    if not is_converted or not any(isinstance(each, Stored) for each in stored):
        return collected
    spec = stored[0].spec
    rows = _rows_to_convert(self, spec, collected)
    if rows is None:
        return {key: [each.read() for each in tensors] for key, tensors in collected.items()}
    _rows_read[spec] = rows
    if _are_rows(spec, stored):
        return {key: [each.read() for each in ts[rows]] for key, ts in collected.items()}
    return {key: [each.read(rows) for each in ts] for key, ts in collected.items()}


_rows_read: weakref.WeakKeyDictionary[ShardSpec, slice] = weakref.WeakKeyDictionary()
"""Rows of parameters of which only these were read, until the converted rows are set."""


def _rows_to_convert(
    converter: Any, spec: ShardSpec, collected: Mapping[str, list[Stored]]
) -> slice | None:
    """Return the rows that are enough for this rank's piece of a conversion's result; None: all.

    A conversion qualifies if its result is one parameter, and if the file has all rows of each part
    of it: as one tensor, or as a tensor for each row.
    """
    kinds = [type(op).__name__ for op in converter.operations]
    keeps_rows = all(
        kind in _KEEP_ROWS and _KEEP_ROWS[kind](op)
        for kind, op in zip(kinds, converter.operations, strict=True)
    )
    is_cut_by_rows = spec.tensor_parallel is None and spec.packing is None and not spec.is_traced
    if not keeps_rows or not is_cut_by_rows or len(converter.target_patterns) != 1:
        return None
    if len(spec.shape) == 1 or not math.prod(spec.shape):
        return None
    num_rows = spec.shape[0]
    if "MergeModulelist" in kinds:
        has_all = all(
            len(tensors) == num_rows and _are_rows(spec, tensors) for tensors in collected.values()
        )
    else:
        has_all = all(
            len(each.shape) == len(spec.shape) and each.shape[0] == num_rows
            for tensors in collected.values()
            for each in tensors
        )
    return spec.rows if has_all else None


def _are_rows(spec: ShardSpec, tensors: list[Stored]) -> bool:
    """Return whether each tensor is one row of the parameter, by its number of dims."""
    return all(len(each.shape) == len(spec.shape) - 1 for each in tensors)


# --- setting --------------------------------------------------------------------------------------


def _setting(
    original: Callable[..., None],
    model: Any,
    target_name: str,
    param_value: Any,
    loading_info: Any,
    hf_quantizer: Any,
) -> None:
    """Wrap what sets a parameter: a sharded one stays, and takes this rank's piece."""
    param = _held(model, target_name)
    if not isinstance(param, ShardedTensor):
        original(model, target_name, param_value, loading_info, hf_quantizer)
        return
    loading_info.missing_keys.discard(target_name)
    rows = _rows_read.pop(param.spec, None)
    num_rows = param.shape[:1] if rows is None else (rows.stop - rows.start,)
    if isinstance(param_value, Stored):
        piece = param_value.piece
    elif param_value.shape == (*num_rows, *param.shape[1:]):
        spec = param.spec
        piece = _own(spec.slice_full(param_value) if rows is None else spec.piece_in(param_value))
    else:
        piece = None
    if piece is None:
        loading_info.mismatched_keys.add((target_name, param_value.shape, param.shape))
        return
    # A second name of a tied parameter was set before.
    if not param.is_meta and not torch.equal(param.to_local().detach(), piece):
        warn_user(
            f"{target_name} is tied to another weight, and the files have different values for "
            f"them. Those of {target_name} are taken. For separate weights pass "
            f"tie_word_embeddings=False."
        )
    param.replace_piece(piece)
    param._is_hf_initialized = True  # type: ignore[attr-defined]


catch_up("transformers")
