"""Run a script or a module without what macOS lacks: /proc, /dev/shm, and calls of Linux alone."""

from __future__ import annotations

import builtins
import ctypes
import functools
import io
import os
import pathlib
import resource
import runpy
import select
import signal
import socket
import sys
import time
import typing

import psutil  # Before files are hidden that it does not read on macOS; so torch.
import torch.distributed

if typing.TYPE_CHECKING:
    from collections.abc import Callable

ABSENT: dict[typing.Any, str] = {
    os: "sched_getaffinity sched_setaffinity memfd_create posix_fadvise posix_fallocate fdatasync "
    "O_DIRECT O_TMPFILE O_PATH O_NOATIME copy_file_range eventfd getrandom pidfd_open splice "
    "setxattr getxattr unshare setns",
    socket: "SO_PEERCRED SO_BINDTODEVICE TCP_KEEPIDLE TCP_USER_TIMEOUT TCP_INFO TCP_QUICKACK "
    "MSG_CMSG_CLOEXEC MSG_NOSIGNAL MSG_MORE AF_NETLINK",
    signal: "SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT sigtimedwait sigwaitinfo",
    time: "CLOCK_BOOTTIME CLOCK_MONOTONIC_COARSE",
    resource: "prlimit",
    select: "epoll",
}
C_FUNCTIONS = ("renameat2", "process_vm_readv", "process_vm_writev", "prctl", "malloc_trim")
FOLDERS = ("/proc/", "/sys/", "/dev/shm/")


def without_folders(function: Callable[..., typing.Any]) -> Callable[..., typing.Any]:
    @functools.wraps(function)
    def look(path: typing.Any, *args: typing.Any, **options: typing.Any) -> typing.Any:
        if isinstance(path, (str, os.PathLike)) and f"{os.fspath(path)}/".startswith(FOLDERS):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *args, **options)

    return look


def take_away() -> None:
    """Take it away from this process, before shardkit is imported."""
    assert psutil.pids()
    assert torch.distributed.is_available()
    for module, names in ABSENT.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink"):
        setattr(os, name, without_folders(getattr(os, name)))
    builtins.open = io.open = without_folders(open)
    found = ctypes.CDLL.__getattr__

    def find(library: ctypes.CDLL, name: str) -> typing.Any:
        if name in C_FUNCTIONS:
            msg = f"dlsym(RTLD_DEFAULT, {name}): symbol not found"
            raise AttributeError(msg)
        return found(library, name)

    ctypes.CDLL.__getattr__ = find  # type: ignore[method-assign]


if __name__ == "__main__":
    take_away()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
