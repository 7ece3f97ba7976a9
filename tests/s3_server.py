"""A real server of S3 (SeaweedFS) on the loopback."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve_app.local import environment, ports, processes
from tests.waiting import until

KEY, SECRET = "key", "secret-secret"
BUCKET = "hermes"
_PARTS = ("master", "volume", "filer", "s3")


class S3Server:
    """`environment`: what a client needs, by AWS's names."""

    where = f"s3://{BUCKET}"

    def __init__(self, folder: Path) -> None:
        self._folder, self._log, self._pid = folder, folder / "weed.log", 0
        self._ports = {
            name: ports.free_port() for part in _PARTS for name in (part, f"{part}.grpc")
        }
        self._url = f"http://127.0.0.1:{self._ports['s3']}"
        access = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        where = {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": self._url}
        self.environment = access | where

    def start(self) -> None:
        """On the same ports and folder each time; returns when it answers."""
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        user = {"name": "a", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
        users = self._folder / "users.json"
        users.write_text(json.dumps({"identities": [{**user, "actions": rights}]}))
        given: dict[str, object] = {"dir": self._folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1"}
        for part in _PARTS:
            given[f"{part}.port"] = self._ports[part]
            given[f"{part}.port.grpc"] = self._ports[f"{part}.grpc"]
        given |= {
            "s3": "true",
            "s3.config": users,
            "s3.iam": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        given |= {"volume.max": 10, "master.volumeSizeLimitMB": 64, "volume.preStopSeconds": 0}
        given |= {"master.telemetry": "false"}
        options = [f"-{name}={value}" for name, value in given.items()]
        weed = [str(environment.PYTHON.with_name("weed")), "-logtostderr=true", "server", *options]
        self._pid = processes.start(weed, self._log, os.environ, self._folder)
        until(f"S3 answers ({self._log})", self._answers)

    def kill(self) -> None:
        """As a crash would; what it has answered is in its files."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            processes.reap(self._pid)
        self._pid = 0
        for number in self._ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                left.unlink(missing_ok=True)

    def unfinished(self) -> list[Any]:
        """The uploads that were begun and neither finished nor given up."""
        url = f"http://127.0.0.1:{self._ports['filer']}/buckets/{BUCKET}/.uploads/"
        asked = urllib.request.Request(url, headers={"accept": "application/json"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return json.load(answer)["Entries"] or []

    def _answers(self) -> bool:
        assert processes.is_alive(self._pid), processes.tail(self._log)
        try:
            with urllib.request.urlopen(f"{self._url}/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Starts it, and ends it."""
    made = S3Server(folder)
    try:
        made.start()
        yield made
    finally:
        made.kill()
