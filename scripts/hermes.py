"""One command of `hermes` under the name that it has in a clone: `scripts/<name>`."""

from __future__ import annotations

import os
import sys

from serve_app.cli import dead_letters, deploy_code, requests, usage
from serve_app.local.preflight import STATE_DIR
from serve_app.local.service import Service

_COMMANDS = {
    "deploy": deploy_code.app,
    "dead-letters": dead_letters.app,
    "requests": requests.app,
    "usage": usage.app,
}


def main(name: str, words: list[str]) -> None:
    """Run it. Requests and dead letters are those of the running quickstart, where there is one."""
    running = Service.load(STATE_DIR) if name != "deploy" else None
    if running is not None and running.running:
        os.environ.setdefault("HERMES_REDIS_URL", running.redis_url)
        os.environ.setdefault("HERMES_URL", running.url)
    _COMMANDS[name](args=words, prog_name=f"scripts/{name}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
