"""HTTP as its clients know it: paths, HEAD, bodies that are compressed, browsers, and streams that
are continued, at a real ingress on a real socket.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.ingress.connection_limits import Uploads
from serve_app.ingress.docs_page import OPEN_PATHS
from serve_app.ingress.exchange import Exchange, Exchanges
from serve_app.ingress.status import PROBES, Readiness
from tests.journal.in_process import (
    Door,
    door,
    door_of,
    in_process,
    ingress_process,
    keys_of,
    settings_of,
)
from tests.journal.journal_helpers import PrivateRedis
from tests.tables import Failures
from tests.waiting import eventually

MODEL = "hermes-tiny"
READ = ("/v1/models", f"/v1/models/{MODEL}", *PROBES, "/metrics", *OPEN_PATHS)
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
ASKED = {"model": MODEL, "prompt": "Once", "max_tokens": 4}


async def ask(d: Door, headers: Mapping[str, str] = JSON, **more: object) -> httpx.Response:
    body = json.dumps({**ASKED, **more}).encode()
    return await d.http.post(COMPLETIONS, content=body, headers={**JSON, **headers})


def ids(answer: httpx.Response) -> list[int]:
    lines = answer.text.splitlines()
    return [int(line.removeprefix("id: ")) for line in lines if line.startswith("id: ")]


async def test_the_probes_of_other_servers_clients_are_answered_without_a_key(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    settings = settings_of(redis_url, namespace, auth=keys_of(tmp_path, "acme"))
    asked = [("GET", path) for path in PROBES] + [("HEAD", "/health"), ("POST", "/ping")]
    with Failures() as failures:
        async with in_process(settings) as d:
            for method, path in asked:
                with failures.of(method, path):
                    assert (await d.http.request(method, path)).status_code == 200
        async with ingress_process(settings) as ingress, door_of(ingress) as d:  # without a worker
            for method, path in asked:
                with failures.of(method, path, "unready"):
                    answer = await d.http.request(method, path)
                    lives = path in ("/healthz", "/version")
                    assert answer.status_code == (200 if lives else 503)
                    assert lives or method == "HEAD" or answer.json()["ready"] is False


async def test_a_path_means_the_same_with_a_slash_at_its_end(
    redis_url: str, namespace: str
) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d:
        name = (await ask(d)).headers["x-request-id"]
        for path in (*READ, f"/v1/requests/{name}", f"/v1/requests/{name}/events"):
            plain, slashed = [await d.http.get(p) for p in (path, path + "/")]
            assert (slashed.status_code, slashed.headers.get("content-type")) == (
                plain.status_code,
                plain.headers.get("content-type"),
            ), path
        assert (await d.http.get("/v1/models/")).json()["object"] == "list"
        assert (await d.http.post(COMPLETIONS + "/", json=ASKED)).status_code == 200
        assert (await d.http.get("/v1/models/other/")).status_code == 404
        docs = httpx.URL("http://door/docs/").join("../docs/swagger-ui.css")
        assert f'"..{docs.path}"' in (await d.http.get("/docs/")).text


async def test_a_field_that_nobody_knows_reaches_neither_journal_nor_comparison(
    redis_url: str, namespace: str
) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d:
        key = {**JSON, "idempotency-key": "one"}
        plain = await ask(d, key)
        assert "x-hermes-ignored" not in plain.headers
        again = await ask(d, key, client_metadata={"a": "b"}, own_id="é")
        assert again.headers["x-hermes-ignored"] == "client_metadata, own_id"
        assert again.headers["x-request-id"] == plain.headers["x-request-id"]
        names: dict[str, Any] = {f"own é,{number:02} {'x' * 80}": number for number in range(11)}
        wrong: dict[str, Any] = {"prompt": [[]]}
        for more in ({}, {"stream": True}, wrong):
            answer = await ask(d, **names, **more)
            ignored = answer.headers["x-hermes-ignored"].split(", ")
            assert ignored[0] == "own???00?" + "x" * 55
            assert (len(ignored), ignored[-1]) == (9, "and 3 more")
        waiting = {**JSON, "prefer": "respond-async"}
        answer = await ask(d, waiting, own_id=1)
        assert (answer.status_code, answer.headers["x-hermes-ignored"]) == (202, "own_id")
        request_id = answer.headers["x-request-id"]
        asked, _ = await d.ingress.base.store.asked(request_id)
        assert asked is None or b"own_id" not in asked
        page = d.ingress.base.telemetry.page().decode()
        assert "hermes_ignored_fields_total 36.0" in page


async def test_head_answers_as_get_without_a_body(redis_url: str, namespace: str) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d:
        name = (await ask(d)).headers["x-request-id"]
        for path in (*READ, f"/v1/requests/{name}"):
            read, head = await d.http.get(path), await d.http.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == read.headers["content-type"]
        assert (await d.http.head("/v1/models/other")).status_code == 404
        assert (await d.http.head(COMPLETIONS)).status_code == 405


async def test_head_of_the_events_of_a_waiting_request_does_not_wait(
    redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace) as d:
        waiting = d.posted("Hi")
        (name,) = await d.waiting(1)
        head = await d.http.head(f"/v1/requests/{name}/events")
        assert head.status_code == 200
        assert head.headers["content-type"].startswith("text/event-stream")
        assert (await d.http.head("/v1/requests/req_never/events")).status_code == 404
        waiting.cancel()


async def test_the_model_says_how_long_a_context_it_has(redis_url: str, namespace: str) -> None:
    async with door(redis_url, namespace) as d:
        for longest, told in ((0, None), (4096, 4096)):
            d.ingress._validator.most_tokens = longest
            (listed,) = (await d.http.get("/v1/models")).json()["data"]
            assert listed == (await d.http.get(f"/v1/models/{MODEL}")).json()
            assert listed["max_model_len"] == told


@pytest.mark.parametrize("coding", ["br", "GZIP", "gzip, identity"])
async def test_a_compressed_body_is_refused_by_the_name_of_its_coding(
    redis_url: str, namespace: str, coding: str
) -> None:
    async with door(redis_url, namespace) as d:
        headers = {**JSON, "content-encoding": coding}
        answer = await d.http.post(COMPLETIONS, content=b"packed", headers=headers)
        assert answer.status_code == 415
        assert coding in answer.json()["error"]["message"]


async def test_an_identical_coding_and_a_byte_order_mark_change_nothing(
    redis_url: str, namespace: str
) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d:
        headers = {**JSON, "content-encoding": "identity"}
        body = b"\xef\xbb\xbf" + json.dumps({**ASKED, "max_tokens": 4.0}).encode()
        answer = await d.http.post(COMPLETIONS, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4


PAGE = {"origin": "https://chat.example.com"}
QUESTION = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_no_web_page_may_call_unless_its_origin_is_named(
    redis_url: str, namespace: str
) -> None:
    async with door(redis_url, namespace) as d:
        assert (await d.http.options(COMPLETIONS, headers=QUESTION)).status_code == 405
        answer = await d.http.get("/v1/models", headers=PAGE)
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("allowed", ["https://chat.example.com", "*"])
async def test_a_web_page_of_a_named_origin_may_call(
    redis_url: str, namespace: str, allowed: str
) -> None:
    origins = {"cors_origins": [allowed, "http://other"]}
    settings = settings_of(redis_url, namespace, ingress=origins)
    async with in_process(settings) as d:
        question = await d.http.options(COMPLETIONS, headers=QUESTION)
        assert "POST" in question.headers["access-control-allow-methods"]
        assert question.headers["access-control-allow-headers"] == "authorization,content-type"
        answers = [
            question,
            await ask(d, PAGE),
            await ask(d, PAGE, stream=True),
            await ask(d, PAGE, n="many"),
            await d.http.get("/v1/models/other", headers=PAGE),
            await d.http.get("/healthz", headers=PAGE),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 404, 200]
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] == allowed
        for answer in answers[1:]:
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        foreign = {**QUESTION, "origin": "https://evil.example.com"}
        refused = await d.http.options(COMPLETIONS, headers=foreign)
        assert ("access-control-allow-origin" in refused.headers) == (allowed == "*")


@pytest.mark.parametrize("streamed", [True, False])
async def test_there_is_nothing_after_the_last_event(
    redis_url: str, namespace: str, streamed: bool
) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d:
        page = f"/v1/requests/{(await ask(d, stream=streamed)).headers['x-request-id']}/events"
        events = await d.http.get(page)
        assert events.headers["content-type"].startswith("text/event-stream")
        last = ids(events)[-1]
        ended = await d.http.get(page, headers={"last-event-id": str(last)})
        assert (ended.status_code, ended.content) == (204, b"")
        assert not {"content-type", "content-length"} & ended.headers.keys()
        beyond = await d.http.get(page, headers={"last-event-id": str(last + 1)})
        assert beyond.status_code == 410


async def test_the_same_key_continues_after_the_last_event(redis_url: str, namespace: str) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d:
        key = {"idempotency-key": "mine"}
        lost = await ask(d, {**key, "last-event-id": "2"}, stream=True)
        assert lost.status_code == 410, "nothing can be continued before it has begun"
        whole = await ask(d, key, stream=True)
        again = await ask(d, {**key, "last-event-id": "2"}, stream=True)
        assert again.headers["x-request-id"] == whole.headers["x-request-id"]
        assert ids(again) == ids(whole)[2:]
        assert whole.text.endswith(again.text)
        last = str(ids(whole)[-1])
        assert (await ask(d, {**key, "last-event-id": last}, stream=True)).status_code == 204
        assert (await ask(d, {**key, "last-event-id": "x"}, stream=True)).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        b'{"max_tokens": 4, "prompt":"Once","model":"hermes-tiny"}',
        b'{"model": "hermes-tiny", "prompt": "\\u004fnce", "max_tokens": 4e0}',
    ],
)
async def test_a_key_stands_for_what_a_body_means(
    redis_url: str, namespace: str, body: bytes
) -> None:
    async with in_process(settings_of(redis_url, namespace)) as d:
        key = {**JSON, "idempotency-key": "mine"}
        first = await ask(d, key)
        again = await d.http.post(COMPLETIONS, content=body, headers=key)
        assert again.headers["x-request-id"] == first.headers["x-request-id"]
        other = await ask(d, key, temperature=0)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_conflict")


async def test_a_request_without_a_host_is_refused(redis_url: str, namespace: str) -> None:
    async with door(redis_url, namespace) as d:
        for version, status in (("1.1", b"400"), ("1.0", b"200")):
            reader, writer = await asyncio.open_connection("127.0.0.1", d.port)
            writer.write(b"GET /healthz HTTP/%b\r\nconnection: close\r\n\r\n" % version.encode())
            answer = await reader.read()
            assert answer.split()[1] == status
            assert json.loads(answer.partition(b"\r\n\r\n")[2]).get("error", {}).keys() == (
                {"message", "type", "param", "code"} if status == b"400" else set()
            )
            writer.close()


def broken(*_: object, **__: object) -> None:
    raise ValueError("a defect")


@pytest.mark.parametrize(
    ("method", "path", "at", "begun"),
    [
        ("POST", COMPLETIONS, (Exchange, "_write"), True),
        ("POST", COMPLETIONS, (Uploads, "of"), False),
        ("GET", "/v1/requests/{}/events", (Exchange, "_write"), True),
        ("GET", "/v1/requests/{}/events", (Exchanges, "attach"), False),
        ("GET", "/readyz", (Readiness, "report"), False),
    ],
)
async def test_after_a_defect_a_response_begins_once(
    redis_url: str,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    at: tuple[type, str],
    begun: bool,
) -> None:
    """One that has begun ends with its connection, and a client that can reconnect reads on."""
    async with in_process(settings_of(redis_url, namespace)) as d:
        path = path.format((await ask(d, stream=True)).headers["x-request-id"])
        monkeypatch.setattr(*at, broken)
        body = json.dumps({**ASKED, "stream": True}).encode()
        headers = [(b"host", b"door"), (b"content-type", b"application/json")]
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path}
        scope |= {"headers": headers, "http_version": "1.1", "query_string": b"", "root_path": ""}
        sent: list[Mapping[str, Any]] = []

        async def receive() -> Mapping[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Mapping[str, Any]) -> None:
            sent.append(message)

        with suppress(ValueError):
            await d.ingress.app()(scope, receive, send)
            assert not begun, "its server would keep the connection"
    if begun:
        assert [message["type"] for message in sent] == ["http.response.start"]
        return
    start, last = sent
    assert (start["type"], start["status"]) == ("http.response.start", 500)
    assert json.loads(last["body"])["error"]["code"] == "internal"


async def test_without_redis_every_question_about_a_request_is_a_503_that_may_be_repeated(
    private_redis: PrivateRedis, namespace: str
) -> None:
    async with in_process(settings_of(private_redis.url, namespace)) as d:
        name = (await ask(d)).headers["x-request-id"]
        private_redis.kill()
        paths = {
            "GET": [
                "/v1/requests",
                *(f"/v1/requests/{name}{rest}" for rest in ("", "/events", "/response")),
                *(f"/v1/responses/resp_{name}{rest}" for rest in ("", "/input_items")),
                "/v1/chat/completions",
                *(f"/v1/chat/completions/chatcmpl-{name}{rest}" for rest in ("", "/messages")),
                "/v1/usage",
                "/v1/organization/usage/completions",
            ],
            "DELETE": [
                f"/v1/{kind}{name}"
                for kind in ("requests/", "responses/resp_", "chat/completions/chatcmpl-")
            ],
            "POST": [f"/v1/responses/resp_{name}/cancel"],
        }
        with Failures() as failures:
            for method, path in ((m, path) for m, found in paths.items() for path in found):
                with failures.of(method, path):
                    answer = await d.http.request(method, path)
                    reason = answer.headers["x-hermes-reason"]
                    assert (answer.status_code, reason) == (503, "journal_unavailable")
                    assert "x-should-retry" not in answer.headers
            for path in ("/metrics", "/v1/models", "/healthz"):
                with failures.of(path):
                    assert (await d.http.get(path)).status_code == 200

        async def unready() -> httpx.Response | None:
            answer = await d.http.get("/readyz")
            return answer if answer.status_code == 503 else None

        told = await eventually(unready)
        assert told.headers["retry-after"]
        assert "Redis" in told.json()["problem"]
        await private_redis.start()


async def test_a_simulated_engine_has_embeddings(redis_url: str, namespace: str) -> None:
    """As the SDK asks for them, and as text; the benchmark measures them beside another system."""
    body: dict[str, Any] = {"model": "hermes-tiny", "input": ["one", "another", "one"]}
    async with in_process(settings_of(redis_url, namespace)) as d:
        floats, packed = [
            (await d.http.post("/v1/embeddings", json={**body, **more})).json()
            for more in ({}, {"encoding_format": "base64"})
        ]
    vectors = [item["embedding"] for item in floats["data"]]
    assert vectors[0] == vectors[2] != vectors[1]
    assert floats["usage"]["prompt_tokens"] > 0
    decoded = [array("f", b64decode(item["embedding"])).tolist() for item in packed["data"]]
    assert decoded == vectors
