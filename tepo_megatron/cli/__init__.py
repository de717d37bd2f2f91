"""The command ``tepo``, one file for each sub-command. Imports of torch are inside functions, so that help is instant."""
