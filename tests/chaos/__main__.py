"""python -m tests.chaos --seconds 120 [--store sqlite|postgres|redis] [--seed N]

Storms on each store for so many seconds, prints what was done, and exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys

from tests.chaos.houses import HOUSES
from tests.chaos.run import chaos

LEASE = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Chaos, with an effects file as judge.")
    parser.add_argument("--seconds", type=float, default=120, help="how long each storm lasts (120)")
    parser.add_argument("--store", action="append", choices=HOUSES, help="may be given again (all)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the plan")
    order = parser.parse_args()
    logging.getLogger("flask_runonce").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that whatever was started is ended
    wrong = 0
    for store in order.store or HOUSES:
        report = chaos(HOUSES[store], order.seconds, lease=LEASE, seed=order.seed)
        print("\n".join([f"{store}, {order.seconds:g} s, seed {order.seed}", *report.lines]), flush=True)
        for fault in report.faults:
            print("  WRONG:", fault, flush=True)
        print(f"  {len(report.faults)} faults\n", flush=True)
        wrong += len(report.faults)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
