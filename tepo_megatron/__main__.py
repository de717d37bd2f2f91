"""``python -m tepo_megatron`` is ``tepo``."""

from tepo_megatron.cli.main import main

if __name__ == "__main__":
    main()
