"""Calls over a connection of an ingress and a worker: real sockets, a real Redis."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from serve_app import timings
from serve_app.cluster import direct_calls
from serve_app.cluster.direct_calls import CallServer, DirectCalls
from serve_app.cluster.replicas import Replicas
from serve_app.contract import (
    AttemptResult,
    CallResult,
    Cause,
    CompletionStats,
    WorkerAddress,
    WorkerLost,
)
from serve_app.errors import RedisUnavailable
from serve_app.processes import IngressProcess, WorkerProcess, make_engine
from serve_app.redis.keyspace import calls_key
from tests.journal.in_process import WORKER, door_of, never, settings_of
from tests.journal.journal_helpers import World
from tests.waiting import PATIENCE_S, eventually

HOST = "127.0.0.1"
CHANNEL = "test:w:ingress-1"


class Attempts:
    """A worker's attempts, which end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, str]] = []
        self.end: asyncio.Future[AttemptResult] = asyncio.get_running_loop().create_future()

    def __call__(self, request_id: str, epoch: int, cause: str) -> asyncio.Task[AttemptResult]:
        self.begun.append((request_id, epoch, cause))
        return asyncio.create_task(self._end())

    async def _end(self) -> AttemptResult:
        return await asyncio.shield(self.end)


class Ray:
    """Counts what is called through Ray's handle."""

    def __init__(self) -> None:
        self.called: list[str] = []

    async def __call__(
        self, request_id: str, epoch: int, replica: str, cause: str
    ) -> AttemptResult:
        self.called.append(request_id)
        return AttemptResult(CallResult.FENCED)


class Both:
    """A worker that takes calls, and an ingress that knows of it."""

    def __init__(self, most_calls: int = 8) -> None:
        self.attempts, self.ray, self.replicas = Attempts(), Ray(), Replicas()
        self.server = CallServer(self.attempts, most_calls)
        self.replicas.serving([WORKER])
        self.woken: list[bytes] = []
        self.calls = DirectCalls(self.replicas, self.ray, CHANNEL, self.woken.append)

    async def connect(self) -> WorkerAddress:
        address = await self.server.start(WORKER, HOST)
        assert address is not None
        self.calls.know([address])
        await eventually(lambda: any(one.proven for one in self.server.connections))
        await eventually(lambda: not self.calls._opening)
        return address

    def call(self, request_id: str = "req_1", cause: str = "") -> asyncio.Future[AttemptResult]:
        return self.calls.execute(request_id, 1, WORKER, cause)


@asynccontextmanager
async def both(most_calls: int = 8) -> AsyncIterator[Both]:
    made = Both(most_calls)
    try:
        yield made
    finally:
        await made.calls.stop()
        await made.server.stop()


async def test_a_call_and_its_answer() -> None:
    async with both() as b:
        await b.connect()
        first, second = b.call("req_1"), b.call("req_2", "lost")
        await eventually(lambda: len(b.attempts.begun) == 2)
        assert b.attempts.begun == [("req_1", 1, ""), ("req_2", 1, "lost")]
        b.attempts.end.set_result(
            answer := AttemptResult(CallResult.ENDED, CompletionStats(7, True, True, 3))
        )
        assert (await first, await second) == (answer, answer)
        assert not b.ray.called


@pytest.mark.parametrize("error", [RedisUnavailable("away"), RuntimeError("a defect\nof ours")])
async def test_an_attempt_that_fails_says_why(error: Exception) -> None:
    async with both() as b:
        await b.connect()
        b.attempts.end.set_exception(error)
        with pytest.raises(WorkerLost) as lost:
            await b.call()
    unread = isinstance(error, RedisUnavailable)
    assert lost.value.cause is (Cause.NOT_OPENED if unread else Cause.LOST)
    assert str(error).splitlines()[-1] in str(lost.value)


async def test_a_broken_connection_fails_all_its_calls_and_the_next_goes_through_ray() -> None:
    async with both() as b:
        address = await b.connect()
        calls = [b.call(f"req_{number}") for number in range(5)]
        await eventually(lambda: len(b.attempts.begun) == 5)
        (connection,) = b.server.connections
        connection.abort()
        for call in calls:
            with pytest.raises(WorkerLost):
                await call
        assert (await b.call("req_6")).outcome is CallResult.FENCED
        assert b.ray.called == ["req_6"]
        assert b.replicas.loss_cause(WORKER) is Cause.LOST, (
            "what another ingress has called here, moves on"
        )
        b.calls.know([address])  # the next reading of the leases
        await eventually(lambda: any(one.proven for one in b.server.connections))
        await eventually(lambda: not b.calls._opening)
        b.attempts.end.set_result(AttemptResult(CallResult.ENDED))
        assert (await b.call("req_7")).outcome is CallResult.ENDED
        assert b.replicas.loss_cause(WORKER) is None


async def test_an_attempt_goes_on_without_the_ingress_that_began_it() -> None:
    async with both() as b:
        await b.connect()
        call = b.call()
        await eventually(lambda: b.attempts.begun)
        await b.calls.stop()
        await eventually(lambda: not b.server.connections)
        assert b.server._running == 1
        b.attempts.end.set_result(AttemptResult(CallResult.ENDED))
        await eventually(lambda: b.server._running == 0)
        with pytest.raises(WorkerLost):
            await call


async def test_more_calls_than_a_worker_takes_are_refused() -> None:
    async with both(most_calls=2) as b:
        await b.connect()
        kept = [b.call("req_1"), b.call("req_2")]
        with pytest.raises(WorkerLost) as refused:
            await b.call("req_3")
        assert refused.value.cause is Cause.NOT_OPENED
        b.attempts.end.set_result(AttemptResult(CallResult.ENDED))
        assert [(await one).outcome for one in kept] == [CallResult.ENDED] * 2


async def test_wake_ups_take_the_connection_of_their_ingress() -> None:
    async with both() as b:
        assert not b.server.send_wakes(CHANNEL, b"nobody is connected")
        await b.connect()
        assert not b.server.send_wakes("test:w:ingress-2", b"of another ingress")
        assert not b.server.send_wakes(CHANNEL, b"x" * timings.CALL_WAKE_BYTES), "it is published"
        assert b.server.send_wakes(CHANNEL, b"first")
        assert b.server.send_wakes(CHANNEL, large := b"x" * (timings.CALL_WAKE_BYTES - 1))
        await eventually(lambda: len(b.woken) == 2)
        assert b.woken == [b"first", large]


async def test_what_an_ingress_does_not_read_is_published() -> None:
    async with both() as b:
        await b.connect()
        (opened,) = b.calls._connections.values()
        assert opened.transport is not None
        opened.transport.pause_reading()
        sent = 0
        while b.server.send_wakes(CHANNEL, b"x" * 100_000):
            sent += 1
            assert sent < 1_000, "the worker keeps without a bound what nobody reads"
            await asyncio.sleep(0)
        assert sent >= 10


async def _said(address: WorkerAddress, *frames: bytes, nonce_first: bool = True) -> bytes:
    """All that a worker answers to a stranger, who then reads until the connection is closed."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    said = await reader.readexactly(4 + 16) if nonce_first else b""
    for frame in frames:
        writer.write(frame)
    with suppress(ConnectionError):
        said += await reader.read()
    writer.close()
    return said


def framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "big") + frame


@pytest.mark.parametrize(
    "frames",
    [
        [framed(b"x" * 48)],
        [framed(b"")],
        [framed(direct_calls._encode([0, "req_1", 1, ""]))],
        [(1 << 31).to_bytes(4, "big")],
        [b"GET / HTTP/1.1\r\nhost: worker\r\n\r\n"],
    ],
)
async def test_who_does_not_know_the_key_gets_a_nonce_and_is_cut_off(
    frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "CALL_PROOF_S", 3_600)
    async with both() as b, asyncio.timeout(PATIENCE_S):
        address = await b.connect()
        assert len(await _said(address, *frames)) == 4 + 16
        assert not b.attempts.begun


async def test_who_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with both() as b:
        address = await b.connect()
        monkeypatch.setattr(timings, "CALL_PROOF_S", 0.0)
        assert len(await _said(address)) <= 4 + 16
        assert len(b.server.connections) == 1, "that of the ingress"


async def test_more_connections_than_a_worker_takes_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timings, "CALL_CONNECTIONS", 1)
    async with both() as b:
        address = await b.connect()
        assert await _said(address, nonce_first=False) == b""


@pytest.mark.parametrize(
    "frame",
    [
        framed(direct_calls._encode([7, "req_" + "x" * 5_000, 1, ""])),
        framed(b"\xc1"),
        framed(direct_calls._encode(["a", 2])),
        framed(direct_calls._encode({"call": 1})),
    ],
)
async def test_a_caller_that_sends_anything_else_is_cut_off(frame: bytes) -> None:
    async with both() as b:
        await b.connect()
        call = b.call()
        (opened,) = b.calls._connections.values()
        assert opened.transport is not None
        opened.transport.write(frame)
        with pytest.raises(WorkerLost):
            await call


async def test_an_address_at_which_another_listens_is_not_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As when a worker has died, and its port is another process's now."""
    async with both() as b:
        address = await b.server.start(WORKER, HOST)
        assert address is not None
        other = address._replace(key="00" * 32)
        for _ in range(3):  # readings of the leases
            b.calls.know([other])
            await eventually(lambda: not b.calls._opening)
        assert caplog.text.count("not reached here") == 1
        assert (await b.call()).outcome is CallResult.FENCED
        assert b.ray.called
        assert not b.attempts.begun


async def test_a_worker_proves_that_it_knows_the_key() -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed(b"n" * 16))
        await reader.readexactly(4 + 32 + 16 + len(CHANNEL))
        writer.write(framed(b"p" * 32) + framed(direct_calls._encode([0, "ended"])))

    async with both() as b, await asyncio.start_server(pretend, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        b.calls.know([WorkerAddress(WORKER, HOST, port, "00" * 32)])
        await eventually(lambda: not b.calls._opening)
        assert (await b.call()).outcome is CallResult.FENCED
        assert b.ray.called == ["req_1"]


async def test_newer_versions_may_add_to_frames() -> None:
    call = direct_calls._calls.decode(direct_calls._encode([3, "req_1", 2, "", "new", {}]))
    reply = direct_calls._replies.decode(direct_calls._encode([3, "ended", "", "", b"new"]))
    assert (call.call, call.epoch, reply.answer) == (3, 2, "ended")


async def test_the_key_is_in_no_log_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with both() as b:
        address = await b.connect()
        await _said(address, framed(b"no key"))
        (b.server.connections.copy().pop()).abort()
        await eventually(lambda: not b.server.connections)
    assert address.key not in caplog.text + repr(address) + str([address])
    assert WorkerAddress.decode(address.encode().encode()) == address


def _ray_tls(folder: Path, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Ray with TLS has it."""
    issued = authority.issue_cert("worker")
    issued.private_key_pem.write_to_path(folder / "key")
    issued.cert_chain_pems[0].write_to_path(folder / "cert")
    authority.cert_pem.write_to_path(folder / "ca")
    for name, value in (
        ("RAY_USE_TLS", "1"),
        ("RAY_TLS_SERVER_CERT", folder / "cert"),
        ("RAY_TLS_SERVER_KEY", folder / "key"),
        ("RAY_TLS_CA_CERT", folder / "ca"),
    ):
        monkeypatch.setenv(name, str(value))


async def _greeting(address: WorkerAddress, tls: ssl.SSLContext) -> bytes:
    reader, _ = await asyncio.open_connection(address.host, address.port, ssl=tls)
    return await reader.readexactly(4 + 16)


async def test_where_ray_uses_tls_a_call_does_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    _ray_tls(tmp_path, authority, monkeypatch)
    async with both() as b:
        address = await b.connect()
        call = b.call()
        b.attempts.end.set_result(AttemptResult(CallResult.ENDED))
        assert (await call).outcome is CallResult.ENDED
        stranger = ssl.create_default_context(cafile=str(tmp_path / "ca"))
        stranger.check_hostname = False  # without a certificate of its own
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await _greeting(address, stranger)


async def test_without_its_certificate_a_worker_leaves_all_calls_to_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ray_tls(tmp_path, trustme.CA(), monkeypatch)
    (tmp_path / "cert").unlink()
    async with both() as b:
        assert await b.server.start(WORKER, HOST) is None


@asynccontextmanager
async def service(w: World, host: str, through_ray: Any = never) -> AsyncIterator[Any]:
    """A worker and an ingress that know each other by their leases alone."""
    settings = settings_of(w.settings.redis.url, w.settings.namespace)
    worker = WorkerProcess(settings, WORKER, "session-1", make_engine(settings), host)
    await worker.start()
    replicas = Replicas()
    replicas.serving([WORKER])
    ingress = IngressProcess(settings, "ingress-1", "session-1", through_ray, replicas)
    try:
        await ingress.start()
        async with door_of(ingress) as d:
            yield worker, d
    finally:
        await ingress.stop()
        await worker.stop()


async def test_a_service_without_one_call_through_ray(w: World) -> None:
    async with service(w, HOST) as (_worker, d):
        await eventually(lambda: d.ingress.calls._by_name)
        answers = await asyncio.gather(*(d.post(f"story {number}") for number in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
    assert await w.operator.zcard(calls_key(w.settings.namespace)) == 0, "it left"


async def test_an_older_worker_is_called_through_ray(w: World) -> None:
    called = []

    async def ray(request_id: str, epoch: int, replica: str, cause: str) -> AttemptResult:
        called.append(request_id)
        return AttemptResult.decode(
            await running.replica.execute(request_id, epoch, replica, cause)
        )

    async with service(w, "", ray) as (running, d):
        answer = await d.post("a story")
        assert answer.status_code == 200
        assert called == [answer.headers["x-request-id"]]
