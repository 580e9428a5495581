"""Serves the sample on loopback, replays the incident against it, and exits with 1 if any count is wrong.

python -m examples.incident.demo [--page]

With `--page` it goes on serving, with the dashboard, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import secrets
import sys
import threading
from typing import Any

from flask import abort
from werkzeug.serving import make_server

from flask_runonce.contrib.dashboard import make_dashboard

from . import create_app
from .replay import ATTEMPTS, replay


def main(*, page: bool = False) -> int:
    """Print what happened; 0 when every count is right. With `page`, serve on until a KeyboardInterrupt."""
    app = create_app({"SECRET_KEY": secrets.token_hex()})
    if page:
        app.register_blueprint(make_dashboard(guard=only_from_this_machine))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    address = f"http://127.0.0.1:{server.server_port}"
    print(f"\n=== A service that starts commands: one start is sent {ATTEMPTS} times ===\n")
    print(f"examples.incident is served at {address}\n")
    try:
        report = replay(address)
        print("\n".join(report.lines))
        print(f"\n{len(report.faults)} counts are wrong." if report.faults else "\nEvery count is right.")
        if page:
            print(f"\nLook at the calls: {address}/runonce/   (Ctrl-C ends it)", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    return 1 if report.faults else 0


def only_from_this_machine(environ: dict[str, Any]) -> None:
    """The dashboard's guard: refuse who is elsewhere, and who came by another name (another site's script, say)."""
    if environ["REMOTE_ADDR"] != "127.0.0.1" or not environ.get("HTTP_HOST", "").startswith("127.0.0.1:"):
        abort(403)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", action="store_true", help="keep serving afterwards, with the dashboard")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    logging.getLogger("flask_runonce").setLevel(logging.ERROR)  # the sample's open cancel routes are meant
    sys.exit(main(page=parser.parse_args().page))
