"""A service that requires API keys, a Redis that requires passwords, and an attacker."""

from __future__ import annotations

import hashlib
import json
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from redis import Redis

from scripts.local import redis_server
from scripts.local import service as local
from scripts.local.environment import ROOT

KEYS = {
    tenant: f"hk-{secrets.token_urlsafe(32)}" for tenant in ("acme", "zeta", "late", "@metrics")
}
HELLO = [{"role": "user", "content": "Who may ask?"}]
BODY: dict[str, Any] = {"model": "hermes-tiny", "messages": HELLO, "max_tokens": 20}


@dataclass
class Closed:
    """What a test needs to know about the service."""

    service: local.Service
    keys_file: Path
    server: redis_server.RedisServer

    def client(self, tenant: str = "") -> httpx.Client:
        headers = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
        return httpx.Client(base_url=self.service.url, headers=headers, timeout=120)

    def redis(self, user: str, password: str | None = None) -> Redis:
        password = self.server.password if password is None else password
        return Redis(port=self.server.port, username=user, password=password, protocol=2)

    def let_in(self, *tenants: str) -> None:
        names = (*tenants, "@metrics")
        lines = [
            f"{tenant} sha256:{hashlib.sha256(KEYS[tenant].encode()).hexdigest()}\n"
            for tenant in names
        ]
        self.keys_file.write_text("".join(lines))


def hostile(closed: Closed, phase: str) -> subprocess.Popen[str]:
    """Another process, so that its own work is not taken for the service's; nicer, for the cores
    are shared.
    """
    command = [
        sys.executable,
        "-m",
        "tests.service.hostility",
        closed.service.url,
        KEYS["acme"],
        BODY["model"],
        phase,
    ]
    return subprocess.Popen(
        ["nice", "-n", "10", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def told(process: subprocess.Popen[str]) -> dict[str, dict[str, int]]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"it ended with {process.wait(60)}"
    answers: dict[str, dict[str, int]] = json.loads(line)
    print(json.dumps(answers, indent=1))
    return answers
