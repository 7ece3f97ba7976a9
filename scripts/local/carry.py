"""`scripts/deploy`: a Serve config file onto a Ray cluster that has only Ray and vLLM installed.

The project's packages, and the small libraries that neither Ray nor vLLM brings (redis, hiredis, fastapi-offline)
are uploaded to the cluster's own package store and named in the application's `runtime_env`; every node fetches them
from there. The rest is `serve deploy`. With `--render FILE` the config is written instead, for `serve deploy FILE`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from scripts.local import service
from serve_app.errors import SettingsError
from serve_app.settings import load_settings

CARRIED = ("serve_app", "workers", "redis", "hiredis", "fastapi_offline")
EXCLUDED = ["**/__pycache__", "*.pyc", "redoc.standalone.js"]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/deploy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="such as cluster/local_cpu.yaml")
    parser.add_argument(
        "--address", default="http://127.0.0.1:8265", help="of the cluster's dashboard (default %(default)s)"
    )
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="write the config for `serve deploy`; deploy nothing"
    )
    parser.add_argument("--timeout-s", type=float, default=600.0, help="to wait until it runs (default %(default)s)")
    return parser.parse_args()


def main() -> int:
    """Check here, upload, deploy, wait until it runs."""
    options = arguments()
    document: dict[str, Any] = yaml.safe_load(options.config.read_text())
    try:
        for application in document["applications"]:
            load_settings(application["args"])
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 1
    with_code(document, options.address)
    if options.render:
        options.render.write_text(yaml.safe_dump(document, sort_keys=False))
        print(f"serve deploy --address {options.address} {options.render}")
        return 0
    try:
        service.deploy(options.address, document)
        wait_running(options.address, options.timeout_s)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def with_code(document: dict[str, Any], address: str, folders: Sequence[Path] | None = None) -> None:
    """Upload packages (`folders`: other ones than those here) and name them in every application's `runtime_env`."""
    client = ServeSubmissionClient(address)
    carried = {"py_modules": [str(path) for path in folders or map(_folder, CARRIED)], "excludes": EXCLUDED}
    client._upload_py_modules_if_needed(carried)
    for application in document["applications"]:
        application.setdefault("runtime_env", {})["py_modules"] = carried["py_modules"]


def _folder(name: str) -> Path:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    return Path(module.__file__).parent


def wait_running(address: str, timeout_s: float) -> None:
    """Until Serve says that the application runs.

    Raises:
        RuntimeError: it failed or took too long.
    """
    deadline = time.monotonic() + timeout_s
    said = ""
    while True:
        status = service.application_status(address)
        line = f"{status.get('status', 'unknown')}"
        if line != said:
            print(f"  {line}", flush=True)
            said = line
        if line == "RUNNING":
            return
        if line in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise RuntimeError(f"the deployment failed: {service.failure(status)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not running after {timeout_s:.0f} s")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
