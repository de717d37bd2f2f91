import errno
import os
import signal
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Any

from tepo_megatron.runtime.preemption import INTERRUPTED, handled_by, not_ignored

with handled_by(lambda *_: os._exit(INTERRUPTED), not_ignored([signal.SIGINT])):  # for a second
    import typer
    from typer.core import TyperGroup

    from tepo_megatron.cli import after_run, config, doctor, experiments, train, weights
    from tepo_megatron.errors import is_ours, wants_traceback
    from tepo_megatron.runtime.rank import print_error
    from tepo_megatron.runtime.text import open_closed_streams

_NOT_TO_SUBMIT = {"math_verify", "matplotlib", "megatron", "numpy", "psutil", "pyarrow", "safetensors", "sentencepiece"}
_NOT_TO_SUBMIT |= {"tensorboard", "torch", "transformers"}
"""Not in requirements/launch.txt, and NumPy."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Turns user errors into a sentence on standard error and exit code 1, Ctrl-C into 130."""
        try:
            return super().invoke(ctx)
        except typer.Exit:  # it is a subclass of RuntimeError
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (ValueError, RuntimeError) as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # an interrupted __set_name__, of a class in an import
                raise typer.Exit(INTERRUPTED) from None
            if wants_traceback() or not is_ours(error):
                raise
            print_error(str(error))
            raise typer.Exit(1) from error
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if wants_traceback() or (error.filename is None and not is_full):
                raise
            what, hint = f"cannot use {error.filename}", "correct that, or give another path"
            if error.filename is None:  # of a write, not of opening a file
                what, hint = "a file cannot be written", "make room and repeat the command, with --resume where it has that"
            print_error(f"{what}: {error.strerror}; {hint}")
            raise typer.Exit(1) from error
        except ModuleNotFoundError as error:
            if wants_traceback() or error.name not in _NOT_TO_SUBMIT:
                raise
            print_error(
                f"this command needs {error.name}, which an environment that submits jobs lacks; use that of setup_cpu.sh"
            )
            raise typer.Exit(1) from error


app = typer.Typer(
    name="tepo",
    cls=_Commands,
    help="Reinforcement learning of language models with TEPO: Megatron-Core trains, vLLM samples.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # help and libraries print what its encoding may not have
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except KeyboardInterrupt:  # while Typer makes the commands
        sys.exit(INTERRUPTED)


def _lazy(name: str, target: str, text: str, default: str | None = None) -> None:
    """Mounts the Typer app ``module:attribute``, imported on use; ``default``: the command if the first word names none."""

    class Lazy(TyperGroup):
        def _load(self) -> TyperGroup:
            module, attribute = target.split(":")
            return typer.main.get_group(getattr(import_module(f"tepo_megatron.cli.{module}"), attribute))

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if default is not None and args and args[0] not in (*self._load().commands, *ctx.help_option_names):
                args = [default, *args]
            return super().parse_args(ctx, args)

        def list_commands(self, ctx: Any) -> list[str]:
            return self._load().list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return self._load().get_command(ctx, cmd_name)

    group = typer.Typer(cls=Lazy, no_args_is_help=True, help=text)
    group.callback()(lambda: None)
    app.add_typer(group, name=name)


for _part in (after_run, config, doctor, experiments, train, weights):
    app.registered_commands += _part.app.registered_commands
_ORDER = (
    *("init", "train", "serve", "eval", "compare", "status", "samples", "plan", "plot", "report"),
    *("import", "export", "doctor", "sweep", "faults"),
)
app.registered_commands.sort(key=lambda command: _ORDER.index(str(command.name)))
app.add_typer(config.config_app, name="config")
_lazy("objective", "objective:app", "Objectives: what there is to choose from.")
_lazy("data", "data:app", "Data: problems as the model will read them, and published benchmarks.")
_lazy("environment", "data:environment_app", "Environments: run them for trainers on other machines.")
_lazy("reward", "data:reward_app", "Rewards: try a verifier on recorded responses.")
_lazy("launch", "launch:app", "Run on a cluster: tepo launch RUN.yaml.", default="run")
_lazy("reshard", "weights:reshard_app", "Weights from Megatron's shards to vLLM's: tepo reshard plan.")
_lazy("checkpoint", "weights:checkpoint_app", "A run's checkpoints: list them, read them through, make room.")
_lazy("bench", "bench:app", "Measure parts of the system on this machine.")
