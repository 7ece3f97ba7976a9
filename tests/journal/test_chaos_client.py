"""The judges of chaos find damage: the checking client, on a real ingress, a real worker with the
simulated engine and a real Redis, and the watchdog.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from scripts.chaos_testing.in_pod import parse, run
from scripts.chaos_testing.journals import Watchdog
from scripts.chaos_testing.traffic import PROMPTS
from tests.journal.in_process import Door, in_process, settings_of
from tests.journal.journal_helpers import World
from tests.tables import each
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.nightly  # a tool

ENGINE = {"kind": "simulated", "args": {"tokens_per_s": 500}}
Damage = Callable[[list[bytes]], list[bytes]]


class Network(httpx.AsyncHTTPTransport):
    """What lies between the service and its client; after the client has asked for every text, it
    changes the events of the streams.
    """

    def __init__(self, damage: Damage) -> None:
        super().__init__()
        self._damage = damage
        self._posts = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        self._posts += request.method == "POST"
        if request.method != "POST" or self._posts <= 2 * len(PROMPTS):
            return answer
        *events, _ = (await answer.aread()).split(b"\n\n")
        headers = {"x-request-id": answer.headers["x-request-id"]}
        body = httpx.ByteStream(b"".join(event + b"\n\n" for event in self._damage(events)))
        return httpx.Response(answer.status_code, headers=headers, stream=body)


def options(d: Door, *more: str) -> list[str]:
    """The client's command line: short streams, and connections that no slow machine breaks."""
    words = ["--users", "3", "--tokens", "30", "--silent-s", str(PATIENCE_S), *more]
    return [str(d.http.base_url), *words]


ERROR = b'id: 6\ndata: {"error": {"code": "attempt_lost"}}'


@each(
    "damage, counts, said",
    [
        (lambda e: e, (0, 0, 0, 0), "completed 3"),
        (lambda e: [*e[:5], *e[6:]], (3, 0, 0, 0), "event 7 after event 5"),
        (lambda e: [*e[:6], *e[5:]], (0, 3, 0, 0), "event 6 after event 6"),
        (lambda e: [*e[:5], other(e[5]), *e[6:]], (0, 0, 3, 0), "differs at character"),
        (lambda e: [*e[:5], ERROR], (0, 0, 0, 3), "attempt_lost 3"),
    ],
)
async def test_damage_of_each_kind_is_told_and_is_the_exit_status(
    redis_url: str,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
    damage: Damage,
    counts: tuple[int, ...],
    said: str,
) -> None:
    async with (
        in_process(settings_of(redis_url, namespace, engine=ENGINE)) as d,
        httpx.AsyncClient(
            base_url=d.http.base_url, transport=Network(damage), timeout=PATIENCE_S
        ) as http,
    ):
        status = await run(parse(options(d, "--minutes", "0")), http)
    told = capsys.readouterr().out
    account = "lost {}, duplicated {}, corrupted {}, ended by an error {}".format(*counts)
    assert account in told.splitlines(), told
    assert said in told
    assert status == (1 if any(counts) else 0)


def other(event: bytes) -> bytes:
    """An event of another text."""
    return event.replace(b'"content":"', b'"content":"x')


async def test_a_claim_that_no_ingress_works_on_is_found_in_a_real_redis(
    w: World, namespace: str
) -> None:
    await w.admit("req_lost")
    await w.queue("ingress-1").claim(1)
    await w.admit("req_waits")  # no engine has room
    dog = Watchdog(w.operator, w.settings.model.name, namespace, within_s=1.5)
    watching = asyncio.create_task(dog.watch())
    await eventually(lambda: dog.findings)
    assert list(dog.findings) == ["req_lost"]
    assert "claimed by ingress-1" in dog.findings["req_lost"]
    watching.cancel()
