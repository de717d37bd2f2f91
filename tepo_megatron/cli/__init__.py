"""The command ``tepo``: one file a command. A command imports what it needs when it runs: help must not wait for torch."""
