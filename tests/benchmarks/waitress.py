"""`python -m tests.benchmarks.waitress PORT THREADS KIND URI`: one of the apps behind waitress."""

from __future__ import annotations

import sys

import waitress

from tests.benchmarks.apps import served

if __name__ == "__main__":
    port, threads, kind, uri = sys.argv[1:]
    waitress.serve(served(kind, uri), listen=f"127.0.0.1:{port}", threads=int(threads), backlog=256)
