from pathlib import Path

import pytest


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which ``tests.support.odd_verifiers`` note what they received."""
    monkeypatch.setenv("TRIES", str(tmp_path / "tries"))
    (tmp_path / "tries").touch()
    return tmp_path / "tries"
