"""Which optimizers cannot run on pieces: their update of one element needs more than that element.

No class says what it is, so they are known by name. Others that look at shapes, rows or norms train
without an error, and otherwise than on one device.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardkit._errors import OptimizerError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MATRIX = "it updates matrices as a whole"
_NORM = "it scales updates by norms of whole parameters"
_ALL = "it takes norms over all parameters"
_REASONS = {
    "muon": _MATRIX,
    "adamuon": _MATRIX,
    "shampoo": _MATRIX,
    "soap": _MATRIX,
    "galore": _MATRIX,
    "psgd": _MATRIX,
    "kron": _MATRIX,
    "apollo": _MATRIX,
    "adafactor": "it keeps state of rows and columns",
    "came": "it keeps state of rows and columns",
    "adammini": "it keeps one number for each head or row",
    "lamb": _NORM,
    "lars": _NORM,
    "larc": _NORM,
    "adamp": _NORM,
    "sgdp": _NORM,
    "novograd": _NORM,
    "lbfgs": _ALL,
    "prodigy": _ALL,
    "dadapt": _ALL,
    "sparseadam": "its gradients are sparse, and sharded ones are dense",
}
_NAME = re.compile(
    r"^(?:distributed|pytorch|paged|fused|single|normuon)?"
    rf"(?P<word>{'|'.join(sorted(_REASONS, key=len, reverse=True))})"
    r"(?:adamw?|adagrad|sgd|lion|adan|v\d|\d*bit|\d+|wrapper|pure|ex|schedulefree)*$"
)


def refuse_class(optimizer_class: type[Optimizer], remedy: str) -> None:
    """Refuse a class of optimizers that is known not to be elementwise.

    Args:
        optimizer_class: The class that users gave, or one that derives from a known one.
        remedy: A sentence that says what to do instead.

    Raises:
        OptimizerError: It is known.
    """
    for base in optimizer_class.__mro__:
        found = _NAME.match(base.__name__.lower().replace("_", ""))
        if found is not None:
            msg = (
                f"{optimizer_class.__module__}.{optimizer_class.__name__} cannot run on pieces of "
                f"parameters: {_REASONS[found['word']]}. {remedy}"
            )
            raise OptimizerError(msg)


def refuse_norms(probe: Optimizer, remedy: str) -> None:
    """Refuse options of bitsandbytes that clip each parameter's update by its norm.

    Raises:
        OptimizerError: They are set.
    """
    if getattr(getattr(probe, "args", None), "max_unorm", 0.0):
        name = type(probe).__name__
        msg = f"{name} with max_unorm cannot run on pieces of parameters: {_NORM}. {remedy}"
        raise OptimizerError(msg)
