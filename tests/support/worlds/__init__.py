"""Programs that tests start as processes of their own, alone or one for each rank (``tests.support.programs``)."""
