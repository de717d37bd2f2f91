"""``log``: what is shown and kept of a run."""

from typing import Literal

from tepo_megatron.config.base import Section


class LogConfig(Section):
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """``auto``: a live view on a terminal, plain lines in a file or a pipe."""

    tensorboard: bool = True
