"""Each sub-command of ``tepo`` has a file. Functions import torch, so that help is instant."""
