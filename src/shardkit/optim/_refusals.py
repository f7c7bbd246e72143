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

_BY_OWNERS = "Use shardkit.optim.MatrixOptimizer for optimizers of matrices, or another class."
_DIRECTLY = "Pass the sharded parameters to the class itself: it then trains as on one device."
_NORM = "it scales updates by norms or means of whole parameters"
_ROWS = "it centers gradients, or scales updates, by rows"
_OVER_ALL = "it computes with norms or means over all parameters"
_OF_LOSS = "it computes with the loss of each step"
_RANDOM = "it draws random numbers"
_ALSO_WHOLES = {_OVER_ALL, _OF_LOSS, _RANDOM}
_REASONS = {
    word: reason
    for reason, words in {
        "it updates matrices as a whole": (
            "muon adamuon shampoo soap galore psgd kron apollo splus scion scionlight conda"
        ),
        "it keeps state of rows and columns": "adafactor came sm3 adalite",
        "it keeps one number for each head or row": "adammini nero",
        _ROWS: "ranger rose",
        _NORM: (
            "lamb lars larc adamp sgdp novograd stableadamw fromage amos aida apollodqn mars "
            "sgdsai stablespam tam adatam"
        ),
        _OVER_ALL: "lbfgs prodigy dadapt adai avagrad adagc adams ranger21",
        _OF_LOSS: "emonavi emolynx emofact",
        _RANDOM: "gravity",
        "its gradients are sparse, and sharded ones are dense": "sparseadam",
    }.items()
    for word in words.split()
}
_OPTIONS = {  # With which an elementwise class is not elementwise.
    "adanorm": _NORM,
    "caution": _NORM,
    "cautious": _NORM,
    "max_grad_norm": _OVER_ALL,
    "max_unorm": _NORM,
    "stable_adamw": _NORM,
    "use_gc": _ROWS,
}
_NAME = re.compile(
    r"^(?:distributed|pytorch|paged|fused|single|normuon|nv)?"
    rf"(?P<word>{'|'.join(sorted(_REASONS, key=len, reverse=True))})"
    r"(?:adamw?|adagrad|sgd|lion|adan|v\d|\d*bit|\d+|wrapper|pure|ex|plus|schedulefree|bigvision)*$"
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
            _refuse(name, _REASONS[found["word"]], on_wholes=on_wholes)
            return


def check_options(optimizer: Optimizer) -> None:
    """Refuse options with which an elementwise class cannot run on pieces of parameters.

    Raises:
        OptimizerError: One of the options is set.
    """
    of_bitsandbytes = getattr(getattr(optimizer, "args", None), "__dict__", {})
    options = {**optimizer.defaults, **of_bitsandbytes}
    for option, reason in _OPTIONS.items():
        if options.get(option):
            _refuse(f"{type(optimizer).__name__} with {option}", reason, on_wholes=False)


def _refuse(name: str, reason: str, *, on_wholes: bool) -> None:
    if on_wholes and reason not in _ALSO_WHOLES:
        return
    where = "where each rank has some parameters" if on_wholes else "on shards of parameters"
    remedy = _DIRECTLY if reason in _ALSO_WHOLES else _BY_OWNERS
    msg = f"{name} cannot run {where}: {reason}. {remedy}"
    raise OptimizerError(msg)
