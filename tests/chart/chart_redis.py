"""The chart's Redis as a process: its start script with its configuration and its users, below one
folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from pathlib import Path
from typing import Any

import psutil
from redis import Redis

from serve_app.local import ports, processes
from tests.chart.charts import NAMED, documents, one

PASSWORD = "of-the-test"


class ChartRedis:
    """What runs in the container, with its paths below `folder`; `pid` is the script's."""

    def __init__(self, folder: Path, lines: str = "", namespace: str = "prod") -> None:
        self.port = ports.free_port()
        self.log = folder / "log"
        self._folder = folder
        objects = documents(NAMED)
        config = one(objects, "ConfigMap", "hermes-redis")["data"]
        for place in ("etc", "run", "data"):
            (folder / place).mkdir(parents=True)
        for name, text in config.items():
            (folder / "etc" / name).write_text(self._below(text))
        self.configure(lines)
        (container,) = one(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"]
        self._container = container
        self._environment = {
            "PATH": os.environ["PATH"],
            "HERMES_NAMESPACE": namespace,
            "HERMES_PASSWORD": PASSWORD,
            "RAY_PASSWORD": "r",
        }
        self.pid = 0

    @property
    def data(self) -> Path:
        """Its volume."""
        return self._folder / "data"

    @property
    def url(self) -> str:
        """For the service's user."""
        return f"redis://hermes:{PASSWORD}@127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        """The service's user."""
        return Redis.from_url(self.url, protocol=2)

    def configure(self, lines: str) -> None:
        """Appends lines to redis.conf, for the next start of redis-server."""
        with (self._folder / "etc" / "redis.conf").open("a") as file:
            file.write(lines)

    def start(self) -> None:
        """Start the script; returns before Redis answers. A file that is too large (`prlimit`) ends
        nothing here, but cannot be written, as on a full volume.
        """
        ignoring = ["sh", "-c", "trap '' XFSZ; exec \"$@\"", "sh"]
        command = [*ignoring, *(self._below(word) for word in self._container["command"])]
        self.pid = processes.start(command, self.log, self._environment, self._folder)

    def server(self) -> int:
        """The pid of redis-server; 0 while there is none."""
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end while we look
                if child.name() == "redis-server" and child.status() != psutil.STATUS_ZOMBIE:
                    return int(child.pid)
        return 0

    def probe(self, name: str) -> list[str]:
        """The command of one of the container's probes."""
        words: list[str] = self._container[name]["exec"]["command"]
        return [re.sub("redis-cli ", f"redis-cli -p {self.port} ", word) for word in words]

    def _below(self, text: str) -> str:
        """A text with the container's paths and port replaced."""
        for place, here in (("/etc/redis", "etc"), ("/run/redis", "run"), ("/data", "data")):
            text = text.replace(place, shlex.quote(str(self._folder / here)))
        text = text.replace("port 6379", f"port {self.port}")
        return text.replace("bind * -::*", "bind 127.0.0.1")
