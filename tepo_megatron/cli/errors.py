"""Turns errors that are sentences for the user into messages and exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tepo_megatron.errors import is_ours, wants_traceback
from tepo_megatron.runtime.preemption import INTERRUPTED
from tepo_megatron.runtime.rank import print_error


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns an error that is a sentence for the user into that sentence on standard error and exit code 1; Ctrl-C into 130."""
    try:
        yield
    except typer.Exit:  # a RuntimeError by its type
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, RuntimeError) as error:
        if wants_traceback() or not is_ours(error):
            raise
        print_error(str(error))
        raise typer.Exit(1) from error
