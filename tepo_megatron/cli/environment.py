"""``tepo environment serve``: runs a configuration's environment for trainers on other machines."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from tepo_megatron.cli.errors import user_errors
from tepo_megatron.cli.options import Overrides, RunFile, load_config

app = typer.Typer(no_args_is_help=True, help="Environments: run them for trainers on other machines.")


@app.callback()
def _group() -> None:
    """Environments: run them for trainers on other machines."""


@app.command()
def serve(
    run: RunFile,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="The address to listen on: of the nodes' inner network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one, which is printed.")] = 8400,
    key_file: Annotated[
        Path, typer.Option(help="The file with the key, written if it is not there; trainers need the same.")
    ] = Path("environment.key"),
) -> None:
    """Run the environment of a configuration until Ctrl-C, for trainers that name it in environment.servers.

    [dim]tepo environment serve run.yaml --host 10.0.0.7 --key-file keys/environment[/]
    """
    with user_errors():
        loaded = load_config(run, overrides or ())
        config = loaded.environment
        if config is None:
            raise ValueError(f"{run} has no section environment; there is nothing to serve")
        from tepo_megatron.tasks.environments.host import make_key
        from tepo_megatron.tasks.environments.service import EnvironmentService

        try:
            key = make_key(key_file)
            service = EnvironmentService(config, host=host, port=port, key=key, sampling=loaded.rollout.sampling)
        except OSError as error:
            raise ValueError(
                f"{host}:{port} cannot be listened on ({error.strerror}); give another --host or --port"
            ) from error
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop())
        typer.echo(f"{config.name} at {service.url}, key in {key_file}")
        if service.notice:
            typer.echo(service.notice)
        service.serve()
