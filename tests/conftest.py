"""Fixtures for all tests."""

import signal

pytest_plugins = ["tests.services"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell leaves it for what it starts in the background: neither the tests that interrupt themselves nor the
    # servers that they start would hear a Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
