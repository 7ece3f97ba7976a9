"""A closed service, with API keys, and a Redis with passwords and an ACL: no secret leaks, and
every way in is tried.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import trustme
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from scripts.chaos_testing.parts import Parts
from scripts.local import ports, processes, ray_cluster, redis_server
from scripts.local import service as local
from scripts.local.environment import ROOT
from serve_app.cli import serve_api
from tests.service.closed import BODY, KEYS, Closed, hostile, told
from tests.service.hostility import bodies
from tests.service.politeness import Polite
from tests.service.services import CONFIG, Services, end, given_time, limited
from tests.service.support import until

MAX_MEMORY_BYTES = 500 << 20  # the running answers of whoever fills the engines grow by 2.5 MB/s
NOISE_S = 0.4  # what two cores, shared with who sends all this, may add


@pytest.fixture(scope="module")
def closed(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    """A closed service with the ACL that the project ships."""
    services.end()
    folder = tmp_path_factory.mktemp("closed")
    redis = redis_server.start(folder / "redis")
    made = Closed(local.Service(""), folder / "keys", redis)
    made.let_in("acme", "zeta")
    environment = {
        "HERMES_REDIS_URL": redis.url(),
        "HERMES_KEYS_FILE": str(made.keys_file),
        **given_time(outage=False),
    }
    changes = {
        "auth": {"required": True},
        "telemetry": {"log_format": "json"},
        "workers": {"health_check_timeout_s": 60.0},
    }
    args = local.merged(limited("simulated", outage=False), changes)
    try:
        made.service = local.start(
            folder / "service",
            CONFIG,
            ports.free_port(),
            args,
            environment=environment,
            timeout_s=600,
        )
        yield made
    finally:
        end(made.service)
        processes.end(redis.pid)


def test_without_a_key_only_probes_and_docs_answer(closed: Closed) -> None:
    with closed.client() as http:
        assert http.get("/healthz").status_code == 200
        assert http.get("/readyz").status_code == 200
        for path in (
            "/docs",
            "/docs/swagger-ui.css",
            "/docs/swagger-ui-bundle.js",
            "/openapi.json",
        ):
            assert http.get(path).status_code == 200, "a browser asks for a page without a key"
        for path in ("/v1/models", "/metrics", "/docs/", "/v1/requests/req_1", "/nothing"):
            answer = http.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for authorization in ("Bearer hk-wrong", "Bearer", f"Basic {KEYS['acme']}"):
            answer = http.post(
                "/v1/chat/completions", json=BODY, headers={"authorization": authorization}
            )
            assert answer.status_code == 401
            assert answer.headers["x-hermes-reason"] == "invalid_api_key"


def test_openais_sdk_raises_its_own_exceptions(closed: Closed) -> None:
    def sdk(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{closed.service.url}/v1", api_key=key)

    with pytest.raises(openai.AuthenticationError):
        sdk("hk-wrong").chat.completions.create(**BODY)
    text = sdk(KEYS["acme"]).chat.completions.create(**BODY).choices[0].message.content
    assert len(text.split()) == 20


def test_a_tenants_requests_are_unknown_to_every_other(closed: Closed) -> None:
    with closed.client("acme") as acme, closed.client("zeta") as zeta:
        slow = {**BODY, "max_tokens": 2000, "stream": True}
        headers = {"idempotency-key": "the same"}
        with acme.stream("POST", "/v1/chat/completions", json=slow, headers=headers) as running:
            mine = running.headers["x-request-id"]
            next(running.iter_bytes())
            for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", "")):
                answer = zeta.request(method, f"/v1/requests/{mine}{path}")
                assert answer.status_code == 404, (method, path)
                assert answer.text == zeta.get("/v1/requests/req_never").text.replace(
                    "req_never", mine
                )
            theirs = zeta.post("/v1/chat/completions", json=BODY, headers=headers)
            assert theirs.status_code == 200
            assert theirs.headers["x-request-id"] != mine
            assert acme.get(f"/v1/requests/{mine}").json()["state"] == "running"
            assert acme.delete(f"/v1/requests/{mine}").json()["state"] == "cancelled"
        assert zeta.get(f"/v1/requests/{mine}").status_code == 404, "also when it has ended"
        done = theirs.headers["x-request-id"]
        assert zeta.get(f"/v1/requests/{done}").json()["state"] == "completed"
        assert acme.get(f"/v1/requests/{done}").status_code == 404, (
            "also when its journal is compacted"
        )


def test_a_key_is_added_and_taken_away_while_the_service_runs(closed: Closed) -> None:
    with closed.client("late") as late, closed.client("acme") as acme:
        assert late.get("/v1/models").status_code == 401
        try:
            closed.let_in("acme", "zeta", "late")
            until(
                "the new key is let in",
                lambda: all(late.get("/v1/models").is_success for _ in range(6)),
            )
            closed.let_in("acme", "zeta")
            until(
                "it is refused again",
                lambda: not any(late.get("/v1/models").is_success for _ in range(6)),
            )
            assert acme.get("/v1/models").status_code == 200
        finally:
            closed.let_in("acme", "zeta")


@pytest.mark.nightly  # in the gate: journal/test_redis_conf.py
@pytest.mark.parametrize(
    "command",
    [
        ("SET", "other:key", "x"),
        ("GET", "RAY_gcs"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("ACL", "LIST"),
        ("SHUTDOWN",),
        ("RESTORE", "hermes:x", "0", "x"),
        ("CLIENT", "PAUSE", "1"),
        ("REPLICAOF", "NO", "ONE"),
        ("SUBSCRIBE", "other"),
    ],
)
def test_the_applications_redis_user_can_touch_its_own_keys_and_nothing_else(
    closed: Closed, command: tuple[str, ...]
) -> None:
    with (
        closed.redis("hermes") as redis,
        pytest.raises((NoPermissionError, ResponseError)) as refused,
    ):
        redis.execute_command(*command)
    assert "no permissions" in str(refused.value).lower() or "noperm" in str(refused.value).lower()


def test_redis_rejects_logins_without_a_password(closed: Closed) -> None:
    with (
        Redis(port=closed.server.port, protocol=2) as nobody,
        pytest.raises((AuthenticationError, ResponseError)),
    ):
        nobody.ping()
    with (
        closed.redis("hermes", "guess") as guessing,
        pytest.raises((AuthenticationError, ResponseError)),
    ):
        guessing.ping()


def test_no_secret_is_in_logs_metrics_journals_or_what_the_dashboard_shows(closed: Closed) -> None:
    with closed.client("acme") as acme:
        answer = acme.post("/v1/chat/completions", json=BODY)
        assert acme.get("/metrics").status_code == 403
        with closed.client("@metrics") as scraper:
            metrics = scraper.get("/metrics").text
            assert scraper.get("/v1/models").status_code == 403
        assert "hermes_requests_admitted_total" in metrics
        with serve_api.ask(
            f"{closed.service.dashboard_url}/api/serve/applications/", timeout_s=30
        ) as page:
            shown = page.read().decode()
    hidden = [*KEYS.values(), closed.server.password]
    places = {"metrics": metrics, "dashboard": shown, "answer": answer.text + str(answer.headers)}
    logs = (
        ray_cluster.short_folder(Path(closed.service.state_dir)) / "ray" / "session_latest" / "logs"
    )
    places |= {
        str(path): path.read_text(errors="replace")
        for path in logs.rglob("*")
        if path.is_file() and path.stat().st_size
    }
    with closed.redis("operator") as redis:
        for key in redis.scan_iter("hermes:*"):
            if redis.type(key) == b"stream":
                places[key.decode()] = str(redis.xrange(key))
    assert len(places) > 10
    for place, text in places.items():
        for secret in hidden:
            assert secret not in text, place


def test_a_log_line_says_as_fields_whose_request_it_was_and_why_it_was_refused(
    closed: Closed,
) -> None:
    with closed.client("acme") as acme:
        assert acme.post("/v1/chat/completions", json={**BODY, "messages": []}).status_code == 400
    logs = (
        ray_cluster.short_folder(Path(closed.service.state_dir)) / "ray" / "session_latest" / "logs"
    )

    def refused() -> dict[str, str] | None:
        for path in logs.glob("worker-*.err"):
            for line in path.read_text(errors="replace").splitlines():
                if line.startswith("{") and "empty array" in line:
                    fields: dict[str, str] = json.loads(line)
                    if fields.get("tenant") == "acme":
                        return fields
        return None

    line = until("the line is written", refused)
    assert line["reason"] == "invalid_request"
    assert line["level"] == "INFO"
    assert line["logger"] == "hermes.ingress"
    assert line["replica"]
    assert line["timestamp"]


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_in_front_streams_only_to_clients_that_trust_the_certificate(
    closed: Closed, tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "pem")
    port = ports.free_port()
    environment = {
        **os.environ,
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
        "HERMES_TLS_PEM": str(tmp_path / "pem"),
        "HERMES_TLS_BIND": f"127.0.0.1:{port}",
        "HERMES_TLS_TO": closed.service.url.removeprefix("http://"),
    }
    front = processes.start(
        [str(ROOT / "cluster" / "tls-start")], tmp_path / "log", environment, tmp_path
    )
    try:
        until("it listens", lambda: ports.is_taken(port))
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        with httpx.Client(verify=trusting, timeout=30) as http:
            sdk = openai.OpenAI(
                base_url=f"https://127.0.0.1:{port}/v1",
                api_key=KEYS["acme"],
                http_client=http,  # type: ignore[arg-type] # its types name `httpx2` alone
            )
            stream = sdk.chat.completions.create(**BODY, stream=True)
            assert (
                len("".join(chunk.choices[0].delta.content or "" for chunk in stream).split()) == 20
            )
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://127.0.0.1:{port}/healthz")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(old)
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"https://127.0.0.1:{port}/healthz", verify=old)
    finally:
        processes.end(front)


@pytest.fixture
def unharmed(closed: Closed) -> Iterator[None]:
    """Whatever was sent: the same processes, no traceback in a log, and Redis below its bound
    throughout.
    """
    parts = Parts(closed.service)
    logs = (
        ray_cluster.short_folder(Path(closed.service.state_dir)) / "ray" / "session_latest" / "logs"
    )

    def tracebacks() -> int:
        return sum(
            path.read_text(errors="replace").count("Traceback")
            for path in logs.glob("worker-*.err")
        )

    before, said = parts.pids("replica"), tracebacks()
    with closed.redis("operator") as redis:
        had = redis.config_get("maxmemory")["maxmemory"]
        redis.config_set("maxmemory", MAX_MEMORY_BYTES)
        redis.config_resetstat()
        yield
        peak_bytes = redis.info("memory")["used_memory_peak"]
        redis.config_set("maxmemory", had)
    print(f"Redis at most {peak_bytes >> 20} MiB of {MAX_MEMORY_BYTES >> 20}")
    assert parts.pids("replica") == before
    assert tracebacks() == said
    assert peak_bytes < MAX_MEMORY_BYTES


@pytest.mark.clock
@pytest.mark.timeout(1200)
def test_hostile_bodies_and_floods_are_refused_and_cost_the_others_nothing(
    closed: Closed, unharmed: None
) -> None:
    me = closed.service.url, KEYS["zeta"], BODY["model"]
    with Polite(*me) as before:
        time.sleep(8)
    with Polite(*me) as meanwhile, hostile(closed, "send") as sending:
        answers = told(sending)
    names = {name for name, _, _ in bodies(BODY["model"])}
    for name in names:
        assert all(status.startswith("4") for status in answers[name]), (name, answers[name])
    for name, statuses in answers.items():
        assert not any(status.startswith("5") for status in statuses), (name, statuses)
    assert meanwhile.wrong == []
    print(f"p99 before {before.p99_s * 1000:.0f} ms, meanwhile {meanwhile.p99_s * 1000:.0f} ms")
    assert meanwhile.p99_s < max(2 * before.p99_s, NOISE_S)


@pytest.mark.clock
@pytest.mark.timeout(1200)
def test_a_tenant_that_fills_engines_and_redis_cannot_block_other_tenants(
    closed: Closed, unharmed: None
) -> None:
    small = {**BODY, "stream": True}
    with hostile(closed, "fill") as filling:
        answers = told(filling)
        refused = {
            status for status in answers["a big body that waits"] if status.startswith("429")
        }
        assert refused, answers
        with closed.client("zeta") as zeta:
            for _ in range(10):
                with zeta.stream("POST", "/v1/chat/completions", json=small) as waiting:
                    assert waiting.status_code == 200, waiting.headers
                    mine = waiting.headers["x-request-id"]
                    assert zeta.delete(f"/v1/requests/{mine}").json()["state"] in (
                        "cancelled",
                        "completed",
                    )
        assert filling.stdin is not None
        filling.stdin.close()
    with closed.client("zeta") as zeta:
        until(
            "the places are free again",
            lambda: zeta.post("/v1/chat/completions", json=BODY).status_code == 200,
        )
