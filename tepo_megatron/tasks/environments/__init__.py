"""Environments of several turns: games, tools, tasks that answer; in processes with limits, here or on nodes of their own."""
