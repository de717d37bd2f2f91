"""How often servers were started again in a run, and why: bounded, and told when the bound is reached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Restarts:
    """Restarts of all servers of a run, of which there may be ``most``."""

    most: int
    done: int = 0
    first_cause: str = ""

    def blame(self, cause: object) -> None:
        """Remember why the first server failed: what comes later may be a consequence."""
        self.first_cause = self.first_cause or str(cause).partition("\n")[0]

    def add(self, count: int, logs: str) -> None:
        """Count restarts that are about to be made. Raises RuntimeError, with the end of the logs, if they are too many."""
        if self.done + count > self.most:
            first = f" The first failure was: {self.first_cause}." if self.first_cause else ""
            raise RuntimeError(
                f"rollout servers died {self.done + count} times; rollout.server.max_restarts = {self.most}.{first}\n{logs}"
            )
        self.done += count
