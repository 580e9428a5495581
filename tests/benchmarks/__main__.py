"""python -m tests.benchmarks [--quick] [--million] [--write]

Measures, and prints the tables. With `--write` they take their place in docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time

from tests.benchmarks import apps, growth, page, served
from tests.benchmarks.compare import compare
from tests.services import RedisServer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="What the guard costs.")
    parser.add_argument("--quick", action="store_true", help="under a minute, and less exact")
    parser.add_argument("--million", action="store_true", help="let SQLite grow to a million rows as well")
    parser.add_argument("--write", action="store_true", help="write the tables to docs/performance.md")
    order = parser.parse_args()
    started = time.monotonic()
    tables = []

    def show(table: str) -> None:
        tables.append(table)
        print(f"{table}\n", flush=True)

    quick: bool = order.quick
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(forgetful=True))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        show(page.where())
        subjects = [*apps.ours(redis, stack), *apps.peers()]
        show(page.ratios(compare(apps.bare(), subjects, rounds=6 if quick else 60, size=15 if quick else 30)))
        sizes = [10**power for power in range(2, 6 if quick else 7)]
        show(page.growth("the memory store", growth.memory(sizes, 4 if quick else 20)))
        sizes = [10**power for power in range(2, 4 if quick else 7 if order.million else 6)]
        show(page.growth("SQLite", growth.sqlite(sizes, 2 if quick else 12)))
        show(page.kept(growth.kept()))
        uris = {"memory": "memory://", "SQLite": f"sqlite:///{folder}/waiting.db", "Redis": redis.url}
        show(
            page.waiting(
                {
                    (server, store): served.waiting(server, uri, 2 if quick else 9)
                    for server in served.COMMANDS
                    for store, uri in uris.items()
                }
            )
        )
        show(page.contention(served.contention(2 if quick else 8, 0.5 if quick else 1)))
        show(page.import_time(served.import_time(5 if quick else 20)))
    if order.write:
        page.write(tables)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
