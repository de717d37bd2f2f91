"""What a tree of processes listens on, by the kernel's own account."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import psutil


class Listener(NamedTuple):
    address: str
    port: int
    program: str
    """The command line of the process that listens."""


def family(pid: int) -> list[psutil.Process]:
    """The process and all below it."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def listeners(pid: int) -> set[Listener]:
    """TCP and UDP sockets on which the process, or one below it, takes what others send."""
    found = set()
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in process.net_connections(kind="inet"):
                if each.status == psutil.CONN_LISTEN or (each.status == psutil.CONN_NONE and not each.raddr):
                    found.add(Listener(each.laddr.ip, each.laddr.port, " ".join(process.cmdline())))
    return found


def unix_sockets(pid: int) -> set[str]:
    """Paths of the sockets in the file system that they have bound."""
    found = set()
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {each.laddr for each in process.net_connections(kind="unix") if each.laddr.startswith("/")}
    return found
