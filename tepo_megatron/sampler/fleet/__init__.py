"""The pool of rollout servers."""
