"""What the guard costs, measured beside the same app without it. `python -m tests.benchmarks` runs all of it."""
