"""Agents: programs that call the model through a chat address."""
