"""For all tests."""

from hypothesis import settings

# Two shared cores: how long an example takes says nothing. The same examples every time, so that a failure of CI is one of
# the change; --hypothesis-profile=default looks for new ones.
settings.register_profile("shared_machine", deadline=None, derandomize=True)
settings.load_profile("shared_machine")
