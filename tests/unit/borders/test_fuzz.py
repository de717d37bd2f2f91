"""``tepo faults`` tries the same entries with more values (``tools/faults/borders.py``)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_megatron.tools.faults import borders  # noqa: F401 (it registers its entries and those of files)
from tepo_megatron.tools.faults.hostile import ENTRIES, attempt

pytestmark = pytest.mark.filterwarnings("ignore")  # a hostile configuration may be accepted with one
EXAMPLES = max(2, settings().max_examples // 5)


@pytest.mark.parametrize("name", sorted(ENTRIES))
@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_border_takes_or_refuses_what_is_hostile(name: str, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    result, said = attempt(name, tmp_path_factory.getbasetemp(), seed)
    assert result != "lost", f"attempt({name!r}, …, {seed}): {said}"
