"""What hardware can do, from a TOML file: rates of products and memory, costs of calls, links."""

from __future__ import annotations

import itertools
import math
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardkit._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

Curve = tuple[tuple[float, float], ...]
"""Points (size, rate) in the order of sizes; between two of them the logarithm is interpolated."""


@dataclass(frozen=True, slots=True)
class Route:
    """What a collective travels over.

    Attributes:
        span: Number of neighbouring ranks that it reaches, such as those of a host.
        latency_s: Seconds of each hop; where it was measured, of a whole collective.
        bytes_per_s: Rate of what a rank sends: (bytes, bytes in a second).
        op: Name of the collective for which it was measured; empty: it is for all.
        num_ranks: Number of ranks with which it was measured; 0: it is for any.
    """

    span: float
    latency_s: float
    bytes_per_s: Curve
    op: str = ""
    num_ranks: int = 0


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """What a rank's hardware can do.

    Attributes:
        name: Name of it.
        device: Type of the device; ``cpu``: the host computes itself.
        memory_nbytes: Bytes that a device has.
        overlap: Part of the time of a collective that costs compute beside it nothing: 1 where an
            engine of its own moves the bytes, 0 where the processor that computes does.
        operator_s: Seconds that the host takes for an operator.
        sharded_operator_s: The same for an operator of the optimizer on a sharded parameter.
        group_s: Seconds that the host takes for a group's forward or backward, beside operators.
        kernel_s: Seconds that the device takes for the smallest operator.
        host_bytes_per_s: Bytes in a second between device and host.
        peak: Most operations of floating point in a second, by dtype.
        products: Rates of matrix products by dtype: (operations, operations in a second).
        memory: Rates of other operators by kind: (bytes read and written, bytes in a second).
            Kinds are ``new`` (the result has new memory), ``in_place``, ``function`` (such as exp),
            and ``host`` (of offloaded tensors).
        links: Links, those of the shortest span first; none where one rank was measured.
    """

    name: str
    device: str
    memory_nbytes: float
    overlap: float
    operator_s: float
    sharded_operator_s: float
    group_s: float
    kernel_s: float
    host_bytes_per_s: float
    peak: dict[str, float]
    products: dict[str, Curve]
    memory: dict[str, Curve]
    links: tuple[Route, ...]

    def check_run(self, device: str, num_ranks: int) -> None:
        """Check that steps of a run can be timed.

        Raises:
            ConfigError: Its devices are others, or it has several ranks and no link was measured.
        """
        if (self.device == "cpu") != (device == "cpu"):
            msg = (
                f"hardware must be a profile of device {device!r}, the run's device, got "
                f"{self.name!r}, a profile of {self.device!r}. Name another profile, or pass "
                f"device={self.device!r}."
            )
            raise ConfigError(msg)
        if num_ranks > 1 and not self.links:
            msg = (
                f"hardware must be a profile with links for a mesh of {num_ranks} ranks, got "
                f"{self.name!r}, which has none. Calibrate with several ranks: python -m shardkit "
                f"launch --nproc-per-node 8 -m shardkit plan --calibrate here.toml."
            )
            raise ConfigError(msg)

    def product_s(self, flops: float, dtype: str) -> float:
        """Return the seconds of a matrix product; a dtype that is not there counts as float32."""
        return flops / rate_at(self.products.get(dtype, self.products["float32"]), flops)

    def memory_s(self, nbytes: float, kind: str) -> float:
        """Return the seconds in which an operator of a kind reads and writes bytes."""
        return nbytes / rate_at(self.memory.get(kind, self.memory["new"]), nbytes)

    def collective_s(self, op: str, nbytes: float, num_ranks: int, span: int) -> float:
        """Return the seconds of a collective over ranks that lie `span` ranks apart at most.

        A ring: each rank sends all but its own part, to a neighbour. Over several hosts all ranks
        of a host send on their own links.

        Args:
            op: Name of it: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
            nbytes: Bytes of the whole tensor.
            num_ranks: Number of ranks.
            span: Number of neighbouring ranks among which they lie.
        """
        if num_ranks == 1:
            return 0.0
        sent = nbytes * (num_ranks - 1) / num_ranks * (2 if op == "all_reduce" else 1)
        measured = [link for link in self.links if link.op == op]
        if measured:
            near = min(
                measured,
                key=lambda link: (
                    abs(math.log(link.num_ranks / num_ranks)) + abs(math.log(link.span / span))
                ),
            )
            return near.latency_s + sent / rate_at(near.bytes_per_s, sent)
        at = next((i for i, link in enumerate(self.links) if link.span >= span), -1)
        outer, inner = self.links[at], self.links[max(at - 1, 0)]
        within = max(1, int(inner.span) * num_ranks // span) if outer is not inner else 1
        rate = within * rate_at(outer.bytes_per_s, sent)
        if within > 1:
            rate = min(rate, rate_at(inner.bytes_per_s, sent))
        hops_s = (num_ranks // within - 1) * outer.latency_s + (within - 1) * inner.latency_s
        return hops_s + sent / rate


def rate_at(curve: Curve, size: float) -> float:
    """Return the rate of a size; beyond the ends that of the end."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, low_rate), (high, high_rate) in itertools.pairwise(curve):
        if size <= high:
            part = math.log(size / low) / math.log(high / low)
            return math.exp((1 - part) * math.log(low_rate) + part * math.log(high_rate))
    return curve[-1][1]


def profile_names() -> list[str]:
    """Return the names of the profiles that come with the package."""
    return sorted(path.name[:-5] for path in _folder().iterdir() if path.name.endswith(".toml"))


def read_profile(name: str) -> HardwareProfile:
    """Return a profile by its name, or by the path of a TOML file.

    Raises:
        ConfigError: There is none, or the file is no profile.
    """
    path: Any = Path(name) if name.endswith(".toml") else _folder() / f"{name}.toml"
    try:
        content = path.read_bytes()
    except OSError as error:
        known = ", ".join(profile_names())
        msg = f"hardware must be one of {known}, or the path of a .toml file, got {name!r}: {error}"
        raise ConfigError(msg) from error
    try:
        return _profile_of(tomllib.loads(content.decode("utf-8")))
    except ValueError as error:  # What is no TOML, or not UTF-8, is one too.
        msg = (
            f"{name!r} is no profile of hardware: {error}. Copy one of those in {_folder()}, or "
            f"measure one by python -m shardkit plan --calibrate."
        )
        raise ConfigError(msg) from error


def _folder() -> Any:
    return resources.files(__package__) / "profiles"


_OPS = ("all_gather", "reduce_scatter", "all_reduce")
_MOST = 1e300
"""Numbers of profiles are smaller, so that they are finite."""
_COSTS = ("operator_s", "sharded_operator_s", "group_s", "kernel_s")


def _profile_of(found: dict[str, Any]) -> HardwareProfile:
    """Return the profile of a TOML document.

    Raises:
        ValueError: A field is none of a profile; it is named.
    """
    _check_names("a field", found, HardwareProfile)
    routes = found.get("links", [])
    if not isinstance(routes, list):
        _refuse("links", "tables, each under [[links]]", routes)
    links = [_route(f"links[{place}]", route) for place, route in enumerate(routes)]
    values: dict[str, Any] = {key: _text(key, found.get(key)) for key in ("name", "device")}
    values |= {key: _rate(key, found.get(key)) for key in ("memory_nbytes", "host_bytes_per_s")}
    values |= {key: _at_least(key, found.get(key), 0) for key in _COSTS}
    values["overlap"] = _number("overlap", found.get("overlap"), "at most 1", lambda x: x <= 1)
    peak = _table("peak", found.get("peak"), "float32", _rate)
    products = _table("products", found.get("products"), "float32", _curve)
    memory = _table("memory", found.get("memory"), "new", _curve)
    links.sort(key=lambda link: link.span)
    return HardwareProfile(
        **values, peak=peak, products=products, memory=memory, links=tuple(links)
    )


def _route(field: str, found: Any) -> Route:
    if not isinstance(found, dict):
        _refuse(field, "a table", found)
    _check_names(f"a field of {field}", found, Route)
    op, num_ranks = found.get("op", ""), found.get("num_ranks", 0)
    if op not in ("", *_OPS):
        _refuse(f"{field}.op", f"empty or one of {', '.join(_OPS)}", op)
    return Route(
        _at_least(f"{field}.span", found.get("span"), 2),
        _at_least(f"{field}.latency_s", found.get("latency_s"), 0),
        _curve(f"{field}.bytes_per_s", found.get("bytes_per_s")),
        op,
        int(_at_least(f"{field}.num_ranks", num_ranks, 2 if op else 0)),
    )


def _check_names(what: str, found: dict[str, Any], kind: type) -> None:
    fields: Any = kind.__dict__["__dataclass_fields__"]
    if others := sorted(set(found) - set(fields)):
        _refuse(what, f"one of {', '.join(fields)}", others[0])


def _refuse(field: str, expected: str, found: Any) -> NoReturn:
    msg = f"{field} must be {expected}, got {'nothing' if found is None else repr(found)}"
    raise ValueError(msg)


def _text(field: str, found: Any) -> str:
    if not isinstance(found, str) or not found:
        _refuse(field, "a text that is not empty", found)
    return found


def _number(field: str, found: Any, expected: str, is_right: Callable[[float], bool]) -> float:
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not is_number or not abs(found) < _MOST or not is_right(found):
        _refuse(field, f"a finite number, {expected}", found)
    return float(found)


def _at_least(field: str, found: Any, least: float) -> float:
    return _number(field, found, f"{least} or more", lambda number: number >= least)


def _rate(field: str, found: Any) -> float:
    return _number(field, found, "more than 0", lambda number: number > 0)


def _table(field: str, found: Any, needed: str, read: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return what each name of a table has; one name must be there."""
    if not isinstance(found, dict):
        _refuse(field, f"a table with {needed}", found)
    given = {needed: None, **found}
    return {name: read(f"{field}.{name}", value) for name, value in given.items()}


def _curve(field: str, found: Any) -> Curve:
    """Return a curve; one number is a rate for all sizes."""
    if isinstance(found, (int, float)):
        return ((1.0, _rate(field, found)),)
    are_pairs = isinstance(found, list) and all(
        isinstance(point, list) and len(point) == 2  # noqa: PLR2004 - size and rate
        for point in found
    )
    if not found or not are_pairs:
        _refuse(field, "a rate, or a list of [size, rate] that is not empty", found)
    points = tuple((_rate(field, size), _rate(field, rate)) for size, rate in found)
    if any(size <= smaller for (smaller, _), (size, _) in itertools.pairwise(points)):
        _refuse(field, "a list of [size, rate] whose sizes rise", found)
    return points


def profile_text(profile: HardwareProfile, about: str) -> str:
    """Return a profile as TOML, with a comment in front."""
    plain = {
        key: getattr(profile, key)
        for key in HardwareProfile.__dataclass_fields__
        if key not in {"peak", "products", "memory", "links"}
    }
    lines = [f"# {line}" for line in about.splitlines()]
    lines += [f"{key} = {_shown(value)}" for key, value in plain.items()]
    for key in ("peak", "products", "memory"):
        lines += ["", f"[{key}]"]
        lines += [f"{name} = {_shown(value)}" for name, value in getattr(profile, key).items()]
    for link in profile.links:
        lines += ["", "[[links]]"]
        lines += [f"{key} = {_shown(getattr(link, key))}" for key in Route.__dataclass_fields__]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
