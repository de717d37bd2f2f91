"""The command ``tepo``, one file per sub-command. Functions import torch, so that help is instant."""
