"""Words to the client's process, over a Unix socket: one line each way. Every answer comes at once,
so no connection through Kubernetes's API has to last.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.chaos_testing.kubernetes.in_pod.rounds import Rounds

_LISTENS_S = 30.0
_RETRY_S = 0.1


async def serve(path: Path, rounds: Rounds) -> None:
    """Obey until cancelled."""

    async def obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:  # the connection of a word that fails must end: Python before 3.11.4 keeps it open
            words = json.loads(await reader.readline())
            writer.write(json.dumps(await _obey(rounds, words)).encode() + b"\n")
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(obey, path)
    async with server:
        await server.serve_forever()


async def send(path: Path, words: Sequence[str]) -> str:
    """Send a word, and return the answer; waits for a process that has just been started."""
    async with asyncio.timeout(_LISTENS_S):
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_RETRY_S)
    writer.write(json.dumps(list(words)).encode() + b"\n")
    answer = await reader.readline()
    writer.close()
    if not answer:
        raise ConnectionError(f"the client did not understand {' '.join(words)}: see its log")
    return answer.decode().strip()


async def _obey(rounds: Rounds, words: list[str]) -> dict[str, Any]:
    match words:
        case ["expect"]:
            rounds.expect()
        case ["begin", users]:
            rounds.begin(int(users))
        case ["users", users]:
            rounds.users(int(users))
        case ["strike"]:
            rounds.strike()
        case ["end"]:
            rounds.end()
        case ["state"]:
            return await rounds.state()
        case ["result"]:
            return rounds.result()
        case _:
            raise ValueError(f"no such word: {' '.join(words)}")
    return {}
