"""For all tests."""

import os
from pathlib import Path

from hypothesis import settings

# Two shared cores: how long an example takes says nothing. The same examples every time, so that a failure of CI is one of
# the change; --hypothesis-profile=default looks for new ones.
settings.register_profile("shared_machine", deadline=None, derandomize=True)
settings.load_profile("shared_machine")

# Processes that tests start import this checkout, and tests.support, as the tests do by pytest's `pythonpath`.
ROOT = str(Path(__file__).parents[1])
if os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] != ROOT:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
