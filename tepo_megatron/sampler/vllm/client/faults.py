"""What a server does wrong, as exceptions. All say which server, and what it did."""

from __future__ import annotations


class ServerFault(RuntimeError):  # noqa: N818
    """A server gave no answer, or one that cannot be right. Another server may answer well, or this one a second time.

    ``url`` is the server's address.
    """

    def __init__(self, message: str, *, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class ServerSilent(ServerFault):
    """A server hangs: no answer, or no progress, within ``rollout.server.request_timeout_s``. Its processes may still live."""


class ServerGone(ServerFault):
    """A server refuses connections, or says that its engine is dead."""
