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


def check_class(optimizer_class: type[Optimizer], *, on_wholes: bool) -> None:
    """Refuse a class that is known not to run inside of another optimizer.

    Args:
        optimizer_class: Class to check; the classes that it inherits from count as well.
        on_wholes: Whether it steps whole parameters, of which each rank has some, and not pieces.

    Raises:
        OptimizerError: It computes with what it would not get, or it needs calls beside its steps:
            schedule-free ones swap their weights for those of training.
    """
    name = f"{optimizer_class.__module__}.{optimizer_class.__name__}"
    if hasattr(optimizer_class, "train") and hasattr(optimizer_class, "eval"):
        msg = (
            f"{name} cannot run inside of another optimizer, because users call its train() and "
            f"eval(). {_DIRECTLY}"
        )
        raise OptimizerError(msg)
    for base in optimizer_class.__mro__:
        found = _NAME.match(base.__name__.lower().replace("_", ""))
        if found is not None:
            reason = _REASONS[found["word"]]
            break
    else:
        return
    if on_wholes and reason != _OVER_ALL:
        return
    where = "where each rank has some parameters" if on_wholes else "on pieces of parameters"
    remedy = _DIRECTLY if reason == _OVER_ALL else BY_OWNERS
    msg = f"{name} cannot run {where}: {reason}. {remedy}"
    raise OptimizerError(msg)
