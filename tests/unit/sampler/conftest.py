from collections.abc import Iterator

import pytest

from tests.support.faulty_server import FaultyServer


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    made = FaultyServer()
    yield made
    made.close()


@pytest.fixture
def servers(server: FaultyServer) -> Iterator[list[FaultyServer]]:
    """Two, of which the first is ``server``."""
    other = FaultyServer()
    yield [server, other]
    other.close()
