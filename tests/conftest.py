"""For all tests."""

from hypothesis import settings

# Two shared cores: how long an example takes says nothing.
settings.register_profile("shared_machine", deadline=None)
settings.load_profile("shared_machine")
