"""What has ended is told to receivers on real sockets at least once, whatever dies."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from serve_app import timings
from serve_app.contract import Reason
from serve_app.observability.metrics import Telemetry
from serve_app.redis.keyspace import outbox_key
from serve_app.webhooks.outbox import Outbox, telling
from tests.http_server import Asked, Wire, head, sending, serving, whole
from tests.journal.in_process import door, in_process, keys_of, settings_of
from tests.journal.journal_helpers import World
from tests.journal.receiving import (
    Killed,
    nothing_waits,
    per_request,
    quick,
    receivers,
    sender,
    subjects,
    tell,
    verified,
    waiting,
    world_with,
)
from tests.journal.test_service_commands import hermes
from tests.waiting import eventually

OK = sending(whole(200, b"thanks"))
BACKGROUND = {"model": "hermes-tiny", "input": "a lighthouse", "background": True}
MANY = 10_000


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """Sets a time of the sender."""
    return quick(monkeypatch)


# -- what is told ----------------------------------------------------------------------------------


async def test_an_end_by_a_worker_is_told_where_the_client_said(
    redis_url: str, namespace: str
) -> None:
    with serving(OK) as server:
        settings = settings_of(redis_url, namespace, webhooks=per_request())
        async with in_process(settings) as at:
            at.http.headers["x-hermes-webhook"] = f"{server.url}/done?key=1"
            found = await at.detached("a lighthouse", max_tokens=5)
            await eventually(lambda: server.asked)
            event = verified(server.asked[0])
            assert server.asked[0].path == "/done?key=1"
            assert server.asked[0].headers["host"] == f"127.0.0.1:{server.port}"
            assert (event["type"], event["data"]) == ("request.completed", {"id": found})
            kept = (await at.http.get(f"/v1/requests/{found}")).json()
            assert kept["state"] == "completed"


async def test_each_end_of_what_goes_on_without_a_client_is_told_once(
    redis_url: str, namespace: str, w: World
) -> None:
    with serving(OK) as server:
        webhooks = receivers(one=server.url)
        async with door(redis_url, namespace, webhooks=webhooks) as at:
            response = (await at.http.post("/v1/responses", json=BACKGROUND)).json()["id"]
            for _ in range(2):
                await at.http.post(f"/v1/responses/{response}/cancel")
            chat = await at.detached("a lighthouse")
            await at.http.delete(f"/v1/requests/{chat}")
            late = await at.detached("a lighthouse")
            assert await at.ingress.endings.end(late, Reason.DEADLINE)
            await eventually(lambda: len(server.asked) == 3)
            told = {event["data"]["id"]: event["type"] for event in map(verified, server.asked)}
            assert told == {
                response: "response.cancelled",
                chat: "request.cancelled",
                late: "request.failed",
            }
            await eventually(lambda: nothing_waits(w))


async def test_whoever_waits_for_an_answer_is_told_nothing_else(
    redis_url: str, namespace: str, w: World
) -> None:
    async with door(redis_url, namespace, webhooks=receivers(one="http://127.0.0.1:1")) as at:
        at.posted("a lighthouse")
        (request_id,) = await at.waiting(1)
        await at.http.delete(f"/v1/requests/{request_id}")
        assert await waiting(w) == 0


async def test_a_url_is_refused_before_the_request_is_accepted(
    redis_url: str, namespace: str
) -> None:
    wrong = {"http://10.0.0.1/": "prefer", "https://localhost.evil.com/": "prefer"}
    async with door(redis_url, namespace, webhooks=per_request()) as at:
        for url, header in {**wrong, "http://localhost/": "x"}.items():
            headers = {header: "respond-async", "x-hermes-webhook": url}
            answer = await at.post("a lighthouse", **headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "x-hermes-webhook"), error


# -- how it is delivered ---------------------------------------------------------------------------


def answering(*answers: bytes) -> Callable[[Asked, Wire], None]:
    """A script that gives these answers in turn, and the last one from then on."""
    left = list(answers)

    def play(asked: Asked, wire: Wire) -> None:
        wire.send(left.pop(0) if len(left) > 1 else left[0])

    return play


@pytest.mark.parametrize(
    "answer",
    [
        whole(500, b""),
        whole(302, b"", location="http://127.0.0.1:1/elsewhere"),
        whole(429, b"", retry_after="7"),
        b"no HTTP at all\r\n\r\n",
    ],
    ids=["500", "302", "429", "other"],
)
async def test_only_2xx_counts_and_everything_else_is_tried_again(
    w: World, later: Callable[[float], None], answer: bytes
) -> None:
    with serving(answering(answer, answer, whole(204, b""))) as server:
        world_with(w, **receivers(one=server.url))
        await tell(w.link, w.settings, "resp_1")
        for tries in (1, 2, 3):
            later(1_000.0 * 3**tries)
            async with sender(w.settings) as made:
                await eventually(lambda: len(server.asked) == tries)  # noqa: B023
                await eventually(lambda: not made._working)
        assert await waiting(w) == 0
        assert len({asked.headers["webhook-id"] for asked in server.asked}) == 1
        assert len({asked.headers["webhook-signature"] for asked in server.asked}) == 3


async def test_a_receiver_that_is_gone_and_an_event_that_is_too_old_are_given_up(
    w: World, later: Callable[[float], None]
) -> None:
    with serving(answering(whole(410, b""))) as gone, serving(answering(whole(503, b""))) as down:
        world_with(w, **receivers(gone=gone.url, down=down.url))
        await tell(w.link, w.settings, "resp_1")
        async with sender(w.settings):
            await eventually(lambda: len(gone.asked) == len(down.asked) == 1)
            await eventually(lambda: _dead(w, 1))
        later(72 * 3_600.0)
        async with sender(w.settings):
            await eventually(lambda: _dead(w, 2))
        dead = await _outbox(w).dead()
        assert [(one.delivery.where, one.reason) for one in dead] == [
            ("gone", "gone"),
            ("down", "given_up"),
        ]
        assert (len(gone.asked), len(down.asked), await waiting(w)) == (1, 2, 0)


def _outbox(w: World) -> Outbox:
    return Outbox(w.settings, w.link, w.link, w.store.clock)


async def _dead(w: World, many: int) -> bool:
    return len(await _outbox(w).dead()) == many


async def test_an_endless_answer_and_a_slow_one_keep_no_other_waiting(
    w: World, timed: Callable[[str, float], None]
) -> None:
    timed("WEBHOOK_ANSWER_S", 0.2)

    def endless(asked: Asked, wire: Wire) -> None:
        wire.send(head(200))
        while True:
            wire.send(b"x" * 65_536)

    def slow(asked: Asked, wire: Wire) -> None:
        wire.pause()

    with serving(endless) as large, serving(slow) as hung, serving(OK) as well:
        world_with(w, **receivers(large=large.url, hung=hung.url, well=well.url))
        async with sender(w.settings) as made:
            await tell(w.link, w.settings, "resp_1")
            await eventually(lambda: large.asked and hung.asked and well.asked)
            await eventually(lambda: not made._working)
        assert await waiting(w) == 1  # the 200 of the endless one counts


# -- where it goes ---------------------------------------------------------------------------------


async def test_it_goes_to_the_address_that_was_checked_whatever_the_name_means_by_then(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the check knows an address for this name; whoever asks for it again finds none."""
    real, looked_up = socket.getaddrinfo, list[str]()

    def lookup(host: str, port: int, *args: Any, **more: Any) -> Any:
        known = host == "hooks.invalid" and not looked_up
        looked_up.extend([host] * known)
        return real("127.0.0.1" if known else host, port, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with serving(OK) as server:
        webhooks = per_request(hosts=["hooks.invalid"])
        async with in_process(settings_of(redis_url, namespace, webhooks=webhooks)) as at:
            at.http.headers["x-hermes-webhook"] = f"http://hooks.invalid:{server.port}/"
            await at.detached("a lighthouse", max_tokens=5)
            await eventually(lambda: server.asked)
            assert server.asked[0].headers["host"] == f"hooks.invalid:{server.port}"


@pytest.mark.parametrize("second", ["127.0.0.1", "93.184.215.14"])
async def test_no_private_address_is_connected_to_even_beside_a_public_one(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, second: str, w: World
) -> None:
    real = socket.getaddrinfo

    def lookup(host: str, port: int, *args: Any, **more: Any) -> Any:
        if host != "localhost":
            return real(host, port, *args, **more)
        stream = socket.AF_INET, socket.SOCK_STREAM, 6, ""
        return [(*stream, ("127.0.0.1", port)), (*stream, (second, port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with serving(OK) as server:
        webhooks = per_request(private_addresses=False)
        async with door(redis_url, namespace, webhooks=webhooks) as at:
            headers = {"x-hermes-webhook": f"http://localhost:{server.port}/"}
            found = await at.http.post("/v1/responses", json=BACKGROUND, headers=headers)
            await at.http.post(f"/v1/responses/{found.json()['id']}/cancel")
            page = at.ingress.base.telemetry.of("hermes_webhook_failures", "private_address")
            await eventually(lambda: page._value.get() == 1)
        assert server.connections == 0
        assert await waiting(w) == 1


@pytest.mark.parametrize(("name", "told"), [("hooks.invalid", True), ("other.invalid", False)])
async def test_the_certificate_must_be_that_of_the_name_not_of_the_address(
    w: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, told: bool
) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **more: real("127.0.0.1", *rest))
    with serving(OK, context) as server:
        world_with(w, **per_request(hosts=["hooks.invalid"]))
        its = w.settings, "response.completed", "resp_1", "t", 1
        await w.link.call(telling(*its, f"https://hooks.invalid:{server.port}/"))
        telemetry = Telemetry()
        name_of = "hermes_webhooks_delivered" if told else "hermes_webhook_failures"
        counted = telemetry.of(name_of, "response.completed" if told else "connection")
        async with sender(w.settings, telemetry=telemetry):
            await eventually(lambda: counted._value.get() == 1)
        assert len(server.asked) == told


async def test_a_host_that_is_not_allowed_any_more_gets_nothing(w: World) -> None:
    with serving(OK) as server:
        world_with(w, **per_request())
        its = w.settings, "response.completed", "resp_1", "t", 1
        await w.link.call(telling(*its, f"http://localhost:{server.port}/"))
        world_with(w, **per_request(hosts=["hooks.example.com"]))
        telemetry = Telemetry()
        async with sender(w.settings, telemetry=telemetry):
            failures = telemetry.of("hermes_webhook_failures", "refused")
            await eventually(lambda: failures._value.get() == 1)
        assert server.connections == 0
        assert await waiting(w) == 1


async def test_no_proxy_of_the_environment_is_used(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(OK) as server, serving(OK) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        world_with(w, **receivers(one=server.url))
        await tell(w.link, w.settings, "resp_1")
        async with sender(w.settings):
            await eventually(lambda: server.asked)
        assert not proxy.asked


# -- whatever dies, and however much waits ---------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_sender_that_dies_at_any_step_loses_nothing(
    w: World, later: Callable[[float], None], timed: Callable[[str, float], None], after: bool
) -> None:
    """Each of three events has one id, however often it comes."""
    timed("WEBHOOK_LEASE_S", 15.0)  # signatures are valid for five minutes
    with serving(OK) as server:
        world_with(w, **receivers(one=server.url, two=server.url))
        expected = set[str]()
        for step in range(1, 11):
            names = [f"resp_{after}_{step}_{number}" for number in range(3)]
            expected.update(names)
            link = Killed(w.settings, at=step, after=after)
            async with sender(w.settings, link):
                await tell(w.link, w.settings, *names)
                await asyncio.wait_for(link.dead.wait(), 60)
            later((timings.WEBHOOK_LEASE_S + 1) * step)
            async with sender(w.settings) as made:
                await eventually(lambda: nothing_waits(w))
                await eventually(lambda: not made._working)
        told = subjects(server)
        assert told.keys() == expected
        assert min(told.values()) >= 2  # for each of both receivers
        ids = {(verified(one)["data"]["id"], one.headers["webhook-id"]) for one in server.asked}
        assert len(ids) == len(expected)


async def test_thousands_of_dead_ones_do_not_delay_another_tenant(
    w: World, timed: Callable[[str, float], None]
) -> None:
    timed("WEBHOOK_ANSWER_S", 1e6)
    with serving(lambda asked, wire: wire.pause()) as hung, serving(OK) as well:
        endpoints = receivers(hung=hung.url, well=well.url)["endpoints"]
        endpoints["hung"]["tenants"], endpoints["well"]["tenants"] = ["bad"], ["good"]
        world_with(w, endpoints=endpoints)
        await tell(w.link, w.settings, *map(str, range(MANY)), tenant="bad")
        async with sender(w.settings):
            await eventually(lambda: len(hung.asked) == timings.WEBHOOKS_OF_A_ROUTE)
            await tell(w.link, w.settings, "resp_good", tenant="good")
            await eventually(lambda: well.asked)
        assert len(hung.asked) == timings.WEBHOOKS_OF_A_ROUTE
        assert await waiting(w) >= MANY


async def test_a_tenant_with_many_dead_receivers_leaves_room_for_others(
    w: World, timed: Callable[[str, float], None]
) -> None:
    timed("WEBHOOK_ANSWER_S", 1e6)
    timed("WEBHOOK_ROUTES", 8)
    timed("WEBHOOK_ROUTES_ALIKE", 4)
    with serving(lambda asked, wire: wire.pause()) as hung, serving(OK) as well:
        urls = {f"hung-{number}": hung.url for number in range(20)}
        endpoints = receivers(**urls, well=well.url)["endpoints"]
        for name, one in endpoints.items():
            one["tenants"] = ["good" if name == "well" else "bad"]
        world_with(w, endpoints=endpoints)
        await tell(w.link, w.settings, "resp_bad", tenant="bad")
        async with sender(w.settings):
            await eventually(lambda: len(hung.asked) == 4)
            await tell(w.link, w.settings, "resp_good", tenant="good")
            await eventually(lambda: well.asked)
        assert len(hung.asked) == 4


async def test_what_is_too_many_is_dead_and_only_the_tenants_own(w: World) -> None:
    world_with(w, **receivers(one="http://127.0.0.1:1"), max_waiting=100, dead=3)
    outbox = _outbox(w)
    await tell(w.link, w.settings, "resp_other", tenant="other")
    await tell(w.link, w.settings, *(f"resp_{number}" for number in range(25)))
    filed = await outbox.file()
    assert (filed.events, filed.dead, filed.waiting) == (26, 15, 11)
    assert len(await outbox.dead()) == 3
    assert {one.delivery.tenant for one in await outbox.dead()} == {"t"}
    for number in range(95):  # as many tenants
        await tell(w.link, w.settings, "resp", tenant=f"tenant-{number}")
    filed = await outbox.file()
    assert (filed.dead, filed.waiting) == (6, 100)
    taken = await outbox.take(1_000)
    assert "one|other" not in taken  # it was the oldest
    assert len(taken) == 96


async def test_events_that_were_lost_while_no_ingress_ran_are_counted(w: World) -> None:
    world_with(w, **receivers(one="http://127.0.0.1:1"), max_waiting=100)
    outbox, ends = _outbox(w), [f"resp_{number}" for number in range(1_000)]
    assert (await outbox.file()).lost == 0
    await tell(w.link, w.settings, *ends)
    left = await w.redis.xlen(outbox_key(w.settings.namespace))
    assert left < 1_000
    filed = await outbox.file()
    assert (filed.events, filed.lost) == (100, 1_000 - left)
    await tell(w.link, w.settings, "one", "more")
    assert [(await outbox.file()).lost for _ in range(3)] == [0, 0, 0]


async def test_a_sender_that_stops_lets_go_of_its_routes(w: World) -> None:
    """Another one does not wait for the end of a lease."""
    with serving(lambda asked, wire: wire.pause()) as hung:
        world_with(w, **receivers(one=hung.url))
        await tell(w.link, w.settings, "resp_1")
        async with sender(w.settings) as first:
            await eventually(lambda: hung.asked)
            await first.stop()
            async with sender(w.settings):
                await eventually(lambda: len(hung.asked) == 2)


# -- dead ones -------------------------------------------------------------------------------------


async def test_operators_see_dead_ones_and_send_them_again(
    redis_url: str, namespace: str, tmp_path: Any
) -> None:
    answers = answering(whole(410, b""), whole(410, b""), whole(200, b""))
    with serving(answers) as server:
        webhooks = receivers(one=server.url)
        auth = {**keys_of(tmp_path, "acme", "boss"), "admin_tenants": ["boss"]}
        async with door(redis_url, namespace, webhooks=webhooks, auth=auth) as at:
            tenants = {"authorization": "Bearer acme"}
            ids = []
            for _ in range(2):
                asked = await at.http.post("/v1/responses", json=BACKGROUND, headers=tenants)
                ids.append(asked.json()["id"])
                await at.http.post(f"/v1/responses/{ids[-1]}/cancel", headers=tenants)
                await eventually(lambda: len(server.asked) == len(ids))
            path = "/v1/organization/webhooks/dead"
            assert (await at.http.get(path, headers=tenants)).status_code == 403
            boss: dict[str, Any] = {"HERMES_API_KEY": "boss"}

            async def listed() -> list[dict[str, Any]]:
                printed = (await hermes(at, "webhooks", "list", "--json", **boss)).stdout
                return [json.loads(line) for line in printed.splitlines()]

            await eventually(lambda: _many(listed, 2))
            first, second = await listed()
            assert [first["subject"], second["subject"]] == ids
            assert (first["reason"], first["tenant"], first["receiver"]) == ("gone", "acme", "one")
            for words in (["redrive", first["id"]], ["drop", second["id"]]):
                done = await hermes(at, "webhooks", *words, **boss)
                assert done.exit_code == 0, done.output
            await eventually(lambda: len(server.asked) == 3)
            assert verified(server.asked[2])["data"]["id"] == ids[0]
            assert verified(server.asked[2]) == verified(server.asked[0])
            assert await listed() == []
            unknown = await hermes(at, "webhooks", "redrive", first["id"], **boss)
            assert unknown.exit_code == 1


async def _many(listed: Callable[[], Any], many: int) -> bool:
    return len(await listed()) == many
