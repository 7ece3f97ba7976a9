"""`python -m scripts.chaos_testing.in_pod`: streams to a release of the chart, every one of them
judged, while somebody breaks the service beside it (docs/evidence/kubernetes.md).

It runs in a pod of the cluster, because a port-forward ends with the pod that it leads to. It needs
nothing but httpx and the modules beside it. SIGTERM ends it: it begins no more streams, waits for
those that run, and prints the account.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx

from scripts.chaos_testing.account import damage, settle, summary
from scripts.chaos_testing.traffic import PROMPTS, Client, End, Told, Unfit, look_up

BEFORE = "the texts of before the faults"
RECORD = "the service's own record of each request"
_ENDS_S = 1800.0
"""The service ends a request at its deadline, so this is for a service that never answers."""
_LOOK_UPS = 32
_SHOW_S = 5.0


class Judge:
    """Users who send stream after stream, and what came of each.

    A model's greedy text can depend on what else is in its batch. If it does, a text of before the
    faults proves nothing, and what a user saw is compared with the request's own events, read again
    after its end.

    Args:
        tokens: of each stream.
    """

    def __init__(self, client: Client, http: httpx.AsyncClient, tokens: int) -> None:
        self._client = client
        self._http = http
        self._tokens = tokens
        self._gate = asyncio.Semaphore(_LOOK_UPS)
        self._texts: dict[tuple[str, int], str] = {}
        self._right: dict[str, str] = {}
        self._told: list[Told] = []
        self.compared_with = ""
        """In words; empty until it is known."""

    async def expect(self) -> None:
        """Ask for every text before any fault.

        Raises:
            Unfit: a stream was not whole.
        """
        self._texts = await self._client.texts([self._tokens], at_once=False)
        same = await self._client.texts([self._tokens], at_once=True) == self._texts
        self.compared_with = BEFORE if same else RECORD

    async def use(self, end: End) -> None:
        """One user, who sends stream after stream until the end, and at least one."""
        while True:
            told = Told(random.choice(PROMPTS), self._tokens, streamed=True)
            self._told.append(told)
            await self._client.ask(told)
            if told.request_id:
                await look_up(self._http, told, self._gate, _ENDS_S)
            if told.done:
                self._right[told.key] = await self._text_of(told)
            if end.over:
                return

    async def _text_of(self, told: Told) -> str:
        """What the user should have seen of a stream that has ended."""
        if self.compared_with == BEFORE:
            return self._texts[told.prompt, told.tokens]
        again = Told(told.prompt, told.tokens, streamed=True, request_id=told.request_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDS_S):
                await self._client.read_again(again)
        return again.text

    async def tell(self) -> None:
        """Print every few seconds how it goes, and what `/readyz` says."""
        while True:
            from_s = time.monotonic()
            await asyncio.sleep(_SHOW_S)
            ready = await self._ready()
            ended = sum(told.over for told in self._told)
            replicas = " ".join(
                f"{kind}={ready.get(kind, '?')}/{ready.get(f'{kind}_wanted', '?')}"
                for kind in ("workers", "ingresses")
            )
            print(
                f"{time.strftime('%H:%M:%S')} running={len(self._told) - ended} ended={ended} "
                f"reconnected={sum(bool(told.breaks) for told in self._told)} "
                f"pause_s={pause_s(self._told, from_s, time.monotonic()):.1f} {replicas}",
                flush=True,
            )

    async def _ready(self) -> dict[str, Any]:
        with contextlib.suppress(httpx.TransportError, ValueError):
            found = (await self._http.get("/readyz")).json()
            return found if isinstance(found, dict) else {}
        return {}

    def report(self) -> tuple[str, bool]:
        """The account in words, and whether every stream was whole."""
        account = settle(self._told, lambda told: self._right.get(told.key, ""))
        longest_s = pause_s(self._told, 0.0, time.monotonic())
        lines = [
            *summary(account),
            f"longest pause of a stream: {longest_s:.1f} s",
            f"texts were compared with {self.compared_with}",
            f"lost {len(account.lost)}, duplicated {len(account.duplicated)}, corrupted "
            f"{len(account.corrupted)}, ended by an error {account.failed.total()}",
            *damage(account),
        ]
        return "\n".join(lines), account.completed == account.sent


def pause_s(all_told: Sequence[Told], from_s: float, now_s: float) -> float:
    """The longest time without an event of a stream that flows, of those that have not ended before
    `from_s`; 0 if none flowed.
    """
    gaps = [
        ended_s - began_s
        for told in all_told
        if told.arrivals_s and not (told.over and told.arrivals_s[-1] <= from_s)
        for began_s, ended_s in pairwise((*told.arrivals_s, *(() if told.over else (now_s,))))
        if ended_s > from_s
    ]
    return max(gaps, default=0.0)


async def _model(http: httpx.AsyncClient) -> str:
    """What clients call the model."""
    try:
        answer = await http.get("/v1/models")
    except httpx.TransportError as error:
        raise Unfit(f"the service cannot be reached: {error!r}") from None
    if answer.status_code != 200:
        raise Unfit(f"GET /v1/models: {answer.status_code} {answer.text.strip()}")
    return str(answer.json()["data"][0]["id"])


async def run(options: argparse.Namespace, http: httpx.AsyncClient) -> int:
    """The run; returns the exit status.

    Raises:
        Unfit: the service does not answer as it should before any fault.
    """
    end = End(time.monotonic() + options.minutes * 60)

    def stop() -> None:
        end.at_s = time.monotonic()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    client = Client(http, await _model(http), give_up_s=_ENDS_S)
    judge = Judge(client, http, options.tokens)
    await judge.expect()
    print(f"users={options.users} compared_with={judge.compared_with!r}", flush=True)
    telling = asyncio.create_task(judge.tell())
    await asyncio.gather(*(judge.use(end) for _ in range(options.users)))
    telling.cancel()
    report, whole = judge.report()
    print(report, flush=True)
    return 0 if whole else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="in_pod", description=__doc__)
    add = parser.add_argument
    add("url", help="where the service answers; the API key is in HERMES_API_KEY")
    add("--users", type=int, default=8, help="concurrent streams (8)")
    add("--tokens", type=int, default=300, help="tokens of each stream (300)")
    add("--minutes", type=float, default=60, help="the end, if no SIGTERM comes before (60)")
    add(
        "--silent-s",
        type=float,
        default=13.0,
        help="after so long without a byte, a connection is broken; more than "
        "settings.ingress.heartbeat_s (13)",
    )
    return parser.parse_args(arguments)


async def main(arguments: list[str]) -> int:
    """Run the client; returns its exit status: 1 if a stream was not whole, 2 if none could be
    sent.
    """
    options = parse(arguments)
    key = os.environ.get("HERMES_API_KEY")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=options.url,
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(options.silent_s, pool=None),
        limits=limits,
    ) as http:
        try:
            return await run(options, http)
        except Unfit as reason:
            print(f"  ✗ {reason}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
