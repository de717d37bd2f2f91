"""Hypothesis draws the package's hostile values (``tools/faults/hostile.py``) by their seeds."""

import json

from hypothesis import strategies as st

from tepo_megatron.tools.faults.hostile import BROKEN, PIECES, Hostile

_randoms = st.integers(0, 2**32 - 1).map(Hostile)
texts = _randoms.map(Hostile.text) | st.sampled_from(PIECES)
"""Some are huge, and some have surrogates."""

valid_texts = texts.map(lambda text: text.encode("utf-8", "replace").decode())
"""They have no surrogates."""

values = _randoms.map(Hostile.value)
"""They may become JSON, with NaN and infinities."""


DEEP = b"[" * 3000
bodies = (values.map(json.dumps) | st.sampled_from(BROKEN) | texts).map(lambda text: text.encode("utf-8", "surrogatepass"))
"""Of HTTP requests."""
