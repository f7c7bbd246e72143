"""The exceptions of shardkit.

Each names the parameter or module, says what was expected and what came, and ends with a remedy. A
fact that all ranks share is checked before anything is sent, so that all of them raise::

    ShardkitError
    ├── MeshError              a mesh that cannot be used: no process group, rank not in it
    ├── LayoutError            a layout that cannot be planned, a shape that does not fit one
    ├── WrapError              `fully_shard` refuses; the module is as it was before the call
    ├── ShardedTensorError     an operation that cannot be done right on this rank's piece alone
    ├── FreedParameterError    an unsharded parameter was used after its memory was given back
    ├── RankMismatchError      ranks of one process group disagree about the model or the step
    ├── NonFiniteGradientError gradients are infinite or not a number
    ├── StateError             a call at a time when it cannot be carried out
    └── CheckpointError        a checkpoint that cannot be written, or cannot be loaded as it is
"""

from __future__ import annotations


class ShardkitError(Exception):
    """Base class of every exception that shardkit raises on purpose."""


class MeshError(ShardkitError, ValueError):
    """A mesh cannot be made or used."""


class LayoutError(ShardkitError, ValueError):
    """A layout cannot be planned, or a tensor does not fit it."""


class WrapError(ShardkitError, ValueError):
    """`fully_shard` refuses its arguments; nothing has been changed."""


class ShardedTensorError(ShardkitError, RuntimeError):
    """An operation on a `ShardedTensor` needs more than this rank's piece."""


class FreedParameterError(ShardkitError, RuntimeError):
    """An unsharded parameter was used after its group was resharded."""


class RankMismatchError(ShardkitError, RuntimeError):
    """Ranks that must agree do not."""


class NonFiniteGradientError(ShardkitError, FloatingPointError):
    """Gradients are infinite or not a number."""


class StateError(ShardkitError, RuntimeError):
    """A call came at a time when it cannot be carried out."""


class CheckpointError(ShardkitError, RuntimeError):
    """A checkpoint cannot be written, or what is on disk cannot be loaded."""
