"""Chaos: a storm of repeats against real servers while workers and stores are killed, frozen, restarted and cut off.

`python -m tests.chaos --seconds 120` is the long form, `tests/test_chaos.py` the short one. The judge is a file of
effects that each run of a handler is written into before anything can fail.
"""
