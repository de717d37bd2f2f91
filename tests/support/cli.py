"""The command line, in this process."""

from typing import Any

from typer.testing import CliRunner, Result

from tepo_megatron.cli.main import app


def invoke(*words: object, code: int = 0, **options: Any) -> Result:
    """``tepo words...``, which must end with this exit code; ``options`` are those of ``CliRunner.invoke``."""
    done = CliRunner().invoke(app, [*map(str, words)], **options)
    assert done.exit_code == code, done.output
    return done
