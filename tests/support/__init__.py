"""What tests share: models, cases, stand-ins, and worlds of processes. Nothing here is a test.

Modules are imported by their full name, `from tests.support.launch import run_dist`, by tests, by each other and by the
processes that they start (tests/conftest.py puts this checkout on the path of both).
"""
