"""Writes docs/reference/from-peers.md from the table of other trainers' settings.

python scripts/peers_page.py > docs/reference/from-peers.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from tepo_megatron.config.peers import Peer, PeerKey, peers

_HEAD = """# From TRL, verl and NeMo-RL

What their settings are here. `tepo config` converts a configuration, with comments on what has no
field:

```bash
tepo config from-trl grpo.yaml > run.yaml
tepo config from-verl ppo_trainer.yaml > run.yaml
tepo config from-nemo-rl grpo_math_1B.yaml > run.yaml
tepo plan run.yaml
```

A key that the file leaves out has the other trainer's default where the table has one. Steps are
counted as here: a step samples once and makes `train.minibatches` updates, so TRL's `max_steps`,
`save_steps` and `eval_steps` are divided by them, and warm-up is in updates. Paths of models and
data are copied: a name of the Hugging Face Hub becomes a folder of yours. The verifier is `math`,
or verl's function, whose signature differs ([rewards](../guides/rewards.md)). A wrong key in a
run's file that is one of these is answered from the same table.
"""


def _rows(peer: Peer) -> Iterator[str]:
    yield f"\n## {peer.title}\n\nIt reads {peer.reads}.\n\n| there | here | |\n|---|---|---|"
    for key, entry in peer.keys.items():
        fields = ", ".join(_code(field.removesuffix(".kind")) for field in entry.fields)
        yield f"| {key} | {fields} | {_remark(entry, peer.defaults.get(key))} |"


def _remark(entry: PeerKey, default: object) -> str:
    parts = [entry.note] if entry.note else ["computed with others"] if entry.made else []
    values = entry.values or {}
    parts += [", ".join(f"{_code(there)} is {_code(here)}" for there, here in values.items())] if values else []
    parts += [f"{' and '.join(map(_code, entry.unset))} leave it unset"] if entry.unset else []
    parts += [f"default there {_code(default)}"] if default is not None else []
    return "; ".join(parts)


def _code(value: object) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


if __name__ == "__main__":
    named = [peer for name, peer in peers().items() if name != "others"]
    sys.stdout.write(_HEAD + "\n".join(row for peer in named for row in _rows(peer)) + "\n")
