"""Classes of optimizers that cannot run on pieces of parameters, or on single parameters.

No class declares what it computes with, so these classes are known by name. Other optimizers that
look at shapes, rows or norms train without an error, but not as on one device.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardkit._errors import OptimizerError

if TYPE_CHECKING:
    from torch.optim import Optimizer

BY_OWNERS = "Use shardkit.optim.MatrixOptimizer for optimizers of matrices, or another class."
"""Remedy for a class that needs whole parameters."""

NORM = "it scales updates by norms of whole parameters"
"""Reason why a class cannot run on pieces."""

_DIRECTLY = "Pass the sharded parameters to the class itself: it then trains as on one device."
_OVER_ALL = "it computes with norms or means over all parameters"
_REASONS = {
    word: reason
    for reason, words in {
        "it updates matrices as a whole": (
            "muon adamuon shampoo soap galore psgd kron apollo splus scion scionlight"
        ),
        "it keeps state of rows and columns": "adafactor came sm3 adalite",
        "it keeps one number for each head or row": "adammini nero",
        NORM: "lamb lars larc adamp sgdp novograd stableadamw fromage amos",
        _OVER_ALL: "lbfgs prodigy dadapt adai avagrad adagc",
        "its gradients are sparse, and sharded ones are dense": "sparseadam",
    }.items()
    for word in words.split()
}
_NAME = re.compile(
    r"^(?:distributed|pytorch|paged|fused|single|normuon)?"
    rf"(?P<word>{'|'.join(sorted(_REASONS, key=len, reverse=True))})"
    r"(?:adamw?|adagrad|sgd|lion|adan|v\d|\d*bit|\d+|wrapper|pure|ex|plus|schedulefree)*$"
)


def check_elementwise(optimizer_class: type[Optimizer]) -> None:
    """Refuse a class that is known not to be elementwise, or to need calls beside its steps."""
    _check_calls(optimizer_class)
    reason = _reason_of(optimizer_class)
    if reason is not None:
        remedy = _DIRECTLY if reason == _OVER_ALL else BY_OWNERS
        name = _full_name(optimizer_class)
        msg = f"{name} cannot run on pieces of parameters: {reason}. {remedy}"
        raise OptimizerError(msg)


def check_by_parameter(optimizer_class: type[Optimizer]) -> None:
    """Refuse a class that is known to update parameters together, or to need other calls."""
    _check_calls(optimizer_class)
    if _reason_of(optimizer_class) == _OVER_ALL:
        name = _full_name(optimizer_class)
        msg = f"{name} cannot run where each rank has some parameters: {_OVER_ALL}. {_DIRECTLY}"
        raise OptimizerError(msg)


def _reason_of(optimizer_class: type[Optimizer]) -> str | None:
    """Return why a class is not elementwise; None if nothing is known against it."""
    for base in optimizer_class.__mro__:
        found = _NAME.match(base.__name__.lower().replace("_", ""))
        if found is not None:
            return _REASONS[found["word"]]
    return None


def _check_calls(optimizer_class: type[Optimizer]) -> None:
    """Refuse a class that swaps its weights for those of training, as schedule-free ones do."""
    if hasattr(optimizer_class, "train") and hasattr(optimizer_class, "eval"):
        msg = (
            f"{_full_name(optimizer_class)} cannot run inside of another optimizer, because users "
            f"call its train() and eval(). {_DIRECTLY}"
        )
        raise OptimizerError(msg)


def _full_name(optimizer_class: type[Optimizer]) -> str:
    return f"{optimizer_class.__module__}.{optimizer_class.__name__}"
