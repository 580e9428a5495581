"""Serves the sample on loopback, replays the incident against it, and exits with 1 if any count is wrong.

python -m examples.incident.demo
"""

from __future__ import annotations

import logging
import sys
import threading

from werkzeug.serving import make_server

from . import create_app
from .replay import replay


def main() -> int:
    """Print what happened; 0 when every count is right."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    logging.getLogger("flask_runonce").setLevel(logging.ERROR)  # the sample's open cancel routes are meant
    server = make_server("127.0.0.1", 0, create_app(), threaded=True)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    print(f"examples.incident is served at http://127.0.0.1:{server.server_port}\n")
    try:
        report = replay(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    print("\n".join(report.lines))
    print(f"\n{len(report.faults)} counts are wrong." if report.faults else "\nEvery count is right.")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
