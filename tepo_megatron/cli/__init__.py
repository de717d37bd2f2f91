"""Each sub-command of ``tepo`` has a file. Functions import torch: help is instant."""
