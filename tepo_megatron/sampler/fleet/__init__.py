"""The pool of rollout servers: start, watch, replace, update weights."""
