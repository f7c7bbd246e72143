"""Hardware profiles, from TOML files: rates of products and memory, costs of calls, links."""

from __future__ import annotations

import itertools
import math
import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardkit._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

Curve = tuple[tuple[float, float], ...]
"""Points (size, rate) in the order of sizes, with logarithmic interpolation between them."""


@dataclass(frozen=True, slots=True)
class Route:
    """A link over which collectives are sent."""

    span: float  # Number of adjacent ranks that it connects, such as those of a host.
    latency_s: float  # Seconds of each hop; for a measured link, of a whole collective.
    bytes_per_s: Curve  # Rate at which a rank sends: (bytes, bytes per second).
    op: str = ""  # Name of the collective for which it was measured; empty: for all.
    num_ranks: int = 0  # Number of ranks with which it was measured; 0: for any.


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """The performance of a rank's hardware."""

    name: str
    device: str  # Type of the device; with ``cpu`` the host itself computes.
    memory_nbytes: float  # Bytes of a device's memory.
    # Part of a collective's time that does not slow concurrent compute: 1 if a separate engine
    # moves the bytes, 0 if the processor that computes moves them.
    overlap: float
    operator_s: float  # Seconds of the host's work for an operator.
    # Seconds of its work for an optimizer's operator on a sharded parameter.
    sharded_operator_s: float
    # Seconds of its work for a group's forward or backward, in addition to operators.
    group_s: float
    kernel_s: float  # Seconds of the device's work for the smallest operator.
    host_bytes_per_s: float  # Bytes per second between device and host.
    peak: dict[str, float]  # The most floating-point operations per second, by dtype.
    # Rates of matrix products by dtype: (operations, operations per second).
    products: dict[str, Curve]
    # Rates of other operators by kind: (bytes read and written, bytes per second). Kinds are
    # ``new`` (the result has new memory), ``in_place``, ``function`` (such as exp), and ``host``
    # (of offloaded tensors).
    memory: dict[str, Curve]
    # Links, those of the shortest span first; empty if one rank was measured.
    links: tuple[Route, ...]

    def check_run(self, device: str, num_ranks: int) -> None:
        """Check that the profile can predict the time of a run's steps.

        Raises:
            ConfigError: The run has other devices, or it has several ranks and no link was
                measured.
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
        """Return the seconds of a matrix product; an unknown dtype counts as float32."""
        return flops / rate_at(self.products.get(dtype, self.products["float32"]), flops)

    def memory_s(self, nbytes: float, kind: str) -> float:
        """Return the seconds in which an operator of one kind reads and writes some bytes."""
        return nbytes / rate_at(self.memory.get(kind, self.memory["new"]), nbytes)

    def collective_s(self, op: str, nbytes: float, num_ranks: int, span: int) -> float:
        """Return the seconds of a collective over ranks that are at most `span` ranks apart.

        The model is a ring: each rank sends all but its own part to the next rank. Over several
        hosts, all ranks of a host send on their own links.

        Args:
            op: Name of the collective: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
            nbytes: Bytes of the whole tensor.
            num_ranks: Number of ranks.
            span: Number of adjacent ranks among which they are.
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
        last = len(self.links) - 1
        at = next((i for i, link in enumerate(self.links) if link.span >= span), last)
        outer, inner = self.links[at], self.links[max(at - 1, 0)]
        within = max(1, int(inner.span) * num_ranks // span) if outer is not inner else 1
        rate = within * rate_at(outer.bytes_per_s, sent)
        if within > 1:
            rate = min(rate, rate_at(inner.bytes_per_s, sent))
        hops_s = (num_ranks // within - 1) * outer.latency_s + (within - 1) * inner.latency_s
        return hops_s + sent / rate


def rate_at(curve: Curve, size: float) -> float:
    """Return the rate at a size; beyond the ends of the curve, the rate at the end."""
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
    """Return a profile from its name, or from the path of a TOML file.

    Raises:
        ConfigError: There is no such profile, or the file is none.
    """
    path: Any = Path(name) if name.endswith(".toml") else _folder() / f"{name}.toml"
    try:
        content = path.read_bytes()
    except OSError as error:
        known = ", ".join(profile_names())
        why = f": {error.strerror}." if name.endswith(".toml") else "."
        msg = f"hardware must be one of {known}, or the path of a .toml file, got {name!r}{why}"
        raise ConfigError(msg) from error
    try:
        return _profile_of(tomllib.loads(content.decode("utf-8")))
    except ValueError as error:  # Also raised if the file is no TOML, or not UTF-8.
        msg = (
            f"{name!r} is no profile of hardware: {error}. Copy one of those in {_folder()}, or "
            f"measure one by python -m shardkit plan --calibrate."
        )
        raise ConfigError(msg) from error


def _folder() -> Any:
    return resources.files(__package__) / "profiles"


_OPS = ("all_gather", "reduce_scatter", "all_reduce")
_MOST = 1e300  # Bound of all numbers in profiles, so that they are finite.
_COSTS = ("operator_s", "sharded_operator_s", "group_s", "kernel_s")


def _profile_of(found: dict[str, Any]) -> HardwareProfile:
    """Return the profile of a TOML document.

    Raises:
        ValueError: A field is wrong; the error names it.
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
    return HardwareProfile(
        **values,
        peak=_table("peak", found.get("peak"), "float32", _rate),
        products=_table("products", found.get("products"), "float32", _curve),
        memory=_table("memory", found.get("memory"), "new", _curve),
        links=tuple(sorted(links, key=lambda link: link.span)),
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


def _check_names(what: str, found: dict[str, Any], kind: Any) -> None:
    names = [field.name for field in fields(kind)]
    if others := sorted(set(found) - set(names)):
        _refuse(what, f"one of {', '.join(names)}", others[0])


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
    """Return the values of a table, by name; the name `needed` must be there."""
    if not isinstance(found, dict):
        _refuse(field, f"a table with {needed}", found)
    given = {needed: None, **found}
    return {name: read(f"{field}.{name}", value) for name, value in given.items()}


def _curve(field: str, found: Any) -> Curve:
    """Return a curve; a single number is the rate at all sizes."""
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
    tables = ("peak", "products", "memory")
    plain = [each.name for each in fields(profile) if each.name not in (*tables, "links")]
    lines = [f"# {line}" for line in about.splitlines()]
    lines += [f"{key} = {_shown(getattr(profile, key))}" for key in plain]
    for key in tables:
        lines += ["", f"[{key}]"]
        lines += [f"{name} = {_shown(value)}" for name, value in getattr(profile, key).items()]
    for link in profile.links:
        lines += ["", "[[links]]"]
        lines += [f"{each.name} = {_shown(getattr(link, each.name))}" for each in fields(link)]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
