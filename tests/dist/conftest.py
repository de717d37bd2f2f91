"""For tests on several ranks."""

import sys
from pathlib import Path

# test files here write `from launch import run_dist`, also when a spawned rank loads them by their file
sys.path.insert(0, str(Path(__file__).parent))
