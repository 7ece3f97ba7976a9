"""A real server of S3 (SeaweedFS) on the loopback."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.local import environment, ports, processes
from tests.waiting import until

KEY, SECRET = "key", "secret-secret"
BUCKET = "hermes"
_PARTS = ("master", "volume", "filer", "s3")


@dataclass
class S3Server:
    """`environment`: what a client needs, by AWS's names."""

    environment: dict[str, str]
    _filer: str

    @property
    def where(self) -> str:
        return f"s3://{BUCKET}"

    def unfinished(self) -> list[Any]:
        """The uploads that were begun and neither finished nor given up."""
        url = f"{self._filer}/buckets/{BUCKET}/.uploads/"
        asked = urllib.request.Request(url, headers={"accept": "application/json"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return json.load(answer)["Entries"] or []


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Starts it, and ends it."""
    port = {name: ports.free_port() for part in _PARTS for name in (part, f"{part}.grpc")}
    rights = ["Admin", "Read", "Write", "List", "Tagging"]
    user = {"name": "a", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
    users = folder / "users.json"
    users.write_text(json.dumps({"identities": [{**user, "actions": rights}]}))
    given: dict[str, object] = {"dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1"}
    for part in _PARTS:
        given |= {f"{part}.port": port[part], f"{part}.port.grpc": port[f"{part}.grpc"]}
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
    log, weed = folder / "weed.log", str(environment.PYTHON.with_name("weed"))
    pid = processes.start([weed, "-logtostderr=true", "server", *options], log, os.environ, folder)
    url = f"http://127.0.0.1:{port['s3']}"
    try:
        until(f"S3 answers ({log})", lambda: _answers(f"{url}/healthz", pid, log))
        access = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        where = {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": url}
        yield S3Server(access | where, f"http://127.0.0.1:{port['filer']}")
    finally:
        processes.end(pid, timeout_s=0)
        for number in port.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                left.unlink(missing_ok=True)


def _answers(url: str, pid: int, log: Path) -> bool:
    assert processes.is_alive(pid), processes.tail(log)
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
