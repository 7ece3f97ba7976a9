"""`python -m scripts.chaos_testing.kubernetes.in_pod serve`, or a word to it."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import httpx

from scripts.chaos_testing.kubernetes.in_pod import control
from scripts.chaos_testing.kubernetes.in_pod.rounds import Rounds
from scripts.chaos_testing.kubernetes.in_pod.texts import Texts
from scripts.chaos_testing.traffic import Client

SOCKET = Path(os.environ.get("HERMES_CHAOS_SOCKET", "/tmp/chaos.sock"))
_LATE_S = 3.0
_GIVE_UP_S = 1800.0
"""The service ends a request at its deadline, so this is for a service that never answers."""


async def serve() -> None:
    """Serve until the pod ends. What it needs is in the environment."""
    given = os.environ
    headers = {"authorization": f"Bearer {key}"} if (key := given.get("HERMES_API_KEY")) else {}
    timeout = httpx.Timeout(float(given["HERMES_HEARTBEAT_S"]) + _LATE_S, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=given["HERMES_URL"], headers=headers, timeout=timeout, limits=limits
    ) as http:
        client = Client(http, given["HERMES_MODEL"], give_up_s=_GIVE_UP_S)
        texts = Texts(client, http, given["HERMES_CHAOS_COMPARE"])
        tokens = int(given["HERMES_CHAOS_TOKENS"])
        chance = random.Random(int(given["HERMES_CHAOS_SEED"]))
        await control.serve(SOCKET, Rounds(client, http, texts, tokens, chance))


def main() -> None:
    """Serve, or send a word."""
    if sys.argv[1:] == ["serve"]:
        asyncio.run(serve())
    else:
        print(asyncio.run(control.send(SOCKET, sys.argv[1:])))


if __name__ == "__main__":
    main()
