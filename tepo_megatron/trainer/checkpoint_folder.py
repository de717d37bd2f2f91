"""Manages checkpoint folders without torch.

No run resumes from ``.partial``, ``.damaged``, or ``.abandoned`` (later than the checkpoint that a run resumed from).
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tepo_megatron.runtime.files import with_retries
from tepo_megatron.runtime.text import parse_json
from tepo_megatron.weights.storage.manifest import MANIFEST, STATE, CheckpointManifest, DamagedCheckpoint

_LEFTOVERS = ("partial", "damaged", "abandoned")

_NAME = re.compile(r"step_(\d{6,})")
_LEFTOVER = re.compile(rf"step_\d{{6,}}\.(?:{'|'.join(_LEFTOVERS)})(?:\.\d+)?")
_STATE_KEYS: dict[str, type] = {"step": int, "updates": int, "model": str, "weights_digest": str}


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def step_of(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    if not match:
        raise ValueError(f"{folder} is no checkpoint; its name must be step_ and six digits, such as step_000040")
    return int(match[1])


def checkpoints(parent: Path) -> list[Path]:
    folders = (path for path in parent.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir())
    return sorted(folders, key=step_of)


def leftovers(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("step_*") if _LEFTOVER.fullmatch(path.name))


def read_state(folder: Path) -> dict[str, Any]:
    """Reads no shard's contents. Raises DamagedCheckpoint."""
    try:
        if not with_retries((folder / MANIFEST).exists):
            return _read_first_format(folder)
    except OSError as error:
        raise DamagedCheckpoint(folder, [f"{MANIFEST} cannot be read: {error.strerror}"]) from None
    manifest = CheckpointManifest.read(folder)
    problems = [*manifest.wrong_files().values()] or list(filter(None, [manifest.wrong_content(STATE)]))
    if problems:
        raise DamagedCheckpoint(folder, problems)
    try:
        state: dict[str, Any] = parse_json(with_retries((folder / STATE).read_bytes), STATE)
    except OSError as error:
        raise DamagedCheckpoint(folder, [f"{STATE} cannot be read: {error.strerror}"]) from None
    except ValueError as error:
        raise DamagedCheckpoint(folder, [str(error)]) from None
    if problems := _wrong_state(state, manifest.step):
        raise DamagedCheckpoint(folder, problems)
    return state


def _read_first_format(folder: Path) -> dict[str, Any]:
    try:
        state = parse_json((folder / STATE).read_bytes(), STATE)
    except OSError:
        raise DamagedCheckpoint(folder, ["it has neither manifest.json nor state.json"]) from None
    except ValueError:
        raise DamagedCheckpoint(folder, [f"manifest.json is missing, and {STATE} is not JSON"]) from None
    if not isinstance(state, dict) or "format" in state:
        raise DamagedCheckpoint(folder, ["manifest.json is missing"])
    named = _NAME.fullmatch(folder.name)
    if problems := _wrong_state(state, int(named[1]) if named else None, keys=("step", "updates")):
        raise DamagedCheckpoint(folder, problems)
    return state


def _wrong_state(state: Any, step: int | None, keys: Iterable[str] = _STATE_KEYS) -> list[str]:
    if not isinstance(state, dict):
        return [f"{STATE} is not an object"]
    problems = [f"{STATE} has no {key}" for key in keys if key not in state]
    problems += [
        f"{STATE}: {key} = {state[key]!r}"
        for key in keys
        if key in state and (type(state[key]) is not _STATE_KEYS[key] or (_STATE_KEYS[key] is int and state[key] < 0))
    ]
    identity = state.get("identity", {"architecture": {}, "config": {}, "versions": {}})
    parts = {"plugins": {}, **identity} if isinstance(identity, dict) else {}
    if not all(isinstance(parts.get(name), dict) for name in ("architecture", "config", "versions", "plugins")):
        problems.append(f"{STATE}: identity is not a run's")
    if not problems and step is not None and state["step"] != step:
        problems.append(f"{STATE} is of step {state['step']}")
    return problems


def retained(steps: Iterable[int], *, newest: int, every: int = 0, best: int | None = None) -> set[int]:
    """``every``: multiples to keep (0: none)."""
    ordered = sorted(steps)
    return {step for step in ordered if step in ordered[-newest:] or step == best or (every and step % every == 0)}


def set_aside(folder: Path, why: str) -> Path:
    """Appends ``.WHY``, or ``.WHY.1`` etc."""
    taken = 0
    target = folder.with_name(f"{folder.name}.{why}")
    while target.exists():
        taken += 1
        target = folder.with_name(f"{folder.name}.{why}.{taken}")
    return folder.rename(target)


def remove(folder: Path) -> str | None:
    """Renames first: no run reads half a checkpoint. Returns a sentence if deleting failed, and for a link, which stays."""
    try:
        if folder.is_symlink():
            return f"{folder} is a link to {folder.readlink()} and stays; remove it by hand"
        target = folder if _LEFTOVER.fullmatch(folder.name) else set_aside(folder, "partial")
        shutil.rmtree(target)
    except OSError as error:
        return f"{folder} could not be removed ({error.strerror or error}); remove it by hand"
    return None
