"""A closed service, with API keys, and a Redis with passwords and an ACL: no secret leaks, and
every way in is tried.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import trustme
from redis import Redis

from scripts.chaos_testing.parts import Parts
from serve_app.cli import serve_api
from serve_app.local import ports, processes, ray_cluster
from serve_app.local.environment import ROOT
from tests.service.hostility import bodies
from tests.service.politeness import Polite
from tests.service.services import KEYS, let_in
from tests.service.support import CHAT, Running, asking, openai_client, text_of_chunks
from tests.waiting import until

BODY = asking("Who may ask?", 20)
MAX_MEMORY_BYTES = 500 << 20  # the running answers of whoever fills the engines grow by 2.5 MB/s
NOISE_S = 0.4  # what two cores, shared with who sends all this, may add


def redis_as(simulated: Running, user: str) -> Redis:
    """The service's Redis, with the login of one of its users."""
    address = urlsplit(simulated.service.redis_url)
    port, password = address.port or 0, address.password
    return Redis(port=port, username=user, password=password, protocol=2)


def logs_of(simulated: Running) -> Path:
    """The folder of the logs of the service's Ray."""
    short = ray_cluster.short_folder(Path(simulated.service.state_dir))
    return short / "ray" / "session_latest" / "logs"


def admit(simulated: Running, *more: str) -> None:
    """Change the file of API keys, so that it also lets in these tenants."""
    state = Path(simulated.service.state_dir)
    let_in(state, "acme", "zeta", "@metrics", *more)


def test_without_a_key_only_probes_and_docs_answer(simulated: Running) -> None:
    with simulated.client() as http:
        assert http.get("/healthz").status_code == 200
        assert http.get("/readyz").status_code == 200
        files = ("swagger-ui.css", "swagger-ui-bundle.js")
        pages = ("/docs", "/docs/", "/openapi.json", *(f"/docs/{file}" for file in files))
        for path in pages:
            assert http.get(path).status_code == 200, "a browser asks for a page without a key"
        for path in ("/v1/models", "/metrics", "/v1/requests/req_1", "/nothing"):
            answer = http.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for authorization in ("Bearer hk-wrong", "Bearer", f"Basic {KEYS['acme']}"):
            answer = http.post(CHAT, json=BODY, headers={"authorization": authorization})
            assert answer.status_code == 401
            assert answer.headers["x-hermes-reason"] == "invalid_api_key"


def test_openais_sdk_raises_its_own_exceptions(simulated: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai_client(simulated.url, "hk-wrong").chat.completions.create(**BODY)
    answer = simulated.sdk.chat.completions.create(**BODY)
    assert len(answer.choices[0].message.content.split()) == 20


def test_a_tenants_requests_are_unknown_to_every_other(simulated: Running) -> None:
    with simulated.client("acme") as acme, simulated.client("zeta") as zeta:
        slow = {**BODY, "max_tokens": 2000, "stream": True}
        headers = {"idempotency-key": "the same"}
        with acme.stream("POST", CHAT, json=slow, headers=headers) as running:
            mine = running.headers["x-request-id"]
            next(running.iter_bytes())
            for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", "")):
                answer = zeta.request(method, f"/v1/requests/{mine}{path}")
                assert answer.status_code == 404, (method, path)
                assert answer.text == zeta.get("/v1/requests/req_never").text.replace(
                    "req_never", mine
                )
            theirs = zeta.post(CHAT, json=BODY, headers=headers)
            assert theirs.status_code == 200
            assert theirs.headers["x-request-id"] != mine
            assert acme.get(f"/v1/requests/{mine}").json()["state"] == "running"
            assert acme.delete(f"/v1/requests/{mine}").json()["state"] == "cancelled"
        assert zeta.get(f"/v1/requests/{mine}").status_code == 404, "also when it has ended"
        done = theirs.headers["x-request-id"]
        assert zeta.get(f"/v1/requests/{done}").json()["state"] == "completed"
        assert acme.get(f"/v1/requests/{done}").status_code == 404, "also when it is compacted"


def let_in_of_six(http: httpx.Client) -> int:
    return sum(http.get("/v1/models").is_success for _ in range(6))


def test_a_key_is_added_and_taken_away_while_the_service_runs(simulated: Running) -> None:
    with simulated.client("late") as late, simulated.client("acme") as acme:
        assert late.get("/v1/models").status_code == 401
        try:
            admit(simulated, "late")
            until("the new key is let in", lambda: let_in_of_six(late) == 6)
            admit(simulated)
            until("it is refused again", lambda: let_in_of_six(late) == 0)
            assert acme.get("/v1/models").status_code == 200
        finally:
            admit(simulated)


def test_no_secret_is_in_logs_metrics_journals_or_what_the_dashboard_shows(
    simulated: Running,
) -> None:
    with simulated.client("acme") as acme:
        theirs = "never-to-be-stored"
        answer = acme.post(CHAT, json=BODY, headers={"cookie": theirs, "x-api-key": theirs})
        assert acme.get("/metrics").status_code == 403
        with simulated.client("@metrics") as scraper:
            metrics = scraper.get("/metrics").text
            assert scraper.get("/v1/models").status_code == 403
        assert "hermes_requests_admitted_total" in metrics
        applications = f"{simulated.service.dashboard_url}/api/serve/applications/"
        shown = serve_api.ask(applications).text
    hidden = [theirs, *KEYS.values(), urlsplit(simulated.service.redis_url).password or ""]
    places = {"metrics": metrics, "dashboard": shown, "answer": answer.text + str(answer.headers)}
    logs = logs_of(simulated)
    places |= {
        str(path): path.read_text(errors="replace")
        for path in logs.rglob("*")
        if path.is_file() and path.stat().st_size
    }
    with redis_as(simulated, "operator") as redis:
        for key in redis.scan_iter("hermes:*"):
            if redis.type(key) == b"stream":
                places[key.decode()] = str(redis.xrange(key))
    assert len(places) > 10
    for place, text in places.items():
        for secret in hidden:
            assert secret not in text, place


def test_a_log_line_says_as_fields_whose_request_it_was_and_why_it_was_refused(
    simulated: Running,
) -> None:
    with simulated.client("acme") as acme:
        assert acme.post(CHAT, json={**BODY, "messages": []}).status_code == 400
    logs = logs_of(simulated)

    def refused() -> dict[str, str] | None:
        for path in logs.glob("worker-*.err"):
            for line in path.read_text(errors="replace").splitlines():
                if line.startswith("{") and "empty array" in line:
                    fields: dict[str, str] = json.loads(line)
                    if fields.get("tenant") == "acme":
                        return fields
        return None

    line = until("the line is written", refused)
    assert (line["level"], line["logger"]) == ("INFO", "hermes.ingress")
    assert line["reason"] == "invalid_request"
    assert line["replica"]
    assert line["timestamp"]


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_in_front_streams_only_to_clients_that_trust_the_certificate(
    simulated: Running, tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "pem")
    port = ports.free_port()
    url = f"https://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
        "HERMES_TLS_PEM": str(tmp_path / "pem"),
        "HERMES_TLS_BIND": f"127.0.0.1:{port}",
        "HERMES_TLS_TO": simulated.url.removeprefix("http://"),
    }
    front = processes.start(
        [str(ROOT / "cluster" / "tls-start")], tmp_path / "log", environment, tmp_path
    )
    try:
        until("it listens", lambda: ports.is_taken(port))
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        with httpx.Client(verify=trusting, timeout=30) as http:
            sdk = openai_client(url, KEYS["acme"], http)
            stream = sdk.chat.completions.create(**BODY, stream=True)
            assert len(text_of_chunks(stream).split()) == 20
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/healthz")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(old)
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz", verify=old)
    finally:
        processes.end(front)


def hostile(service: Running, phase: str) -> subprocess.Popen[str]:
    """Another process, so that its own work is not taken for the service's; nicer, for the cores
    are shared.
    """
    module = ["nice", "-n", "10", sys.executable, "-m", "tests.service.hostility"]
    command = [*module, service.url, service.keys["acme"], service.model, phase]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)


def told(process: subprocess.Popen[str]) -> dict[str, dict[str, int]]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"it ended with {process.wait(60)}"
    answers: dict[str, dict[str, int]] = json.loads(line)
    print(json.dumps(answers, indent=1))
    return answers


@pytest.fixture
def unharmed(simulated: Running) -> Iterator[None]:
    """Whatever was sent: the same processes, no traceback in a log, and Redis below its bound
    throughout.
    """
    parts = Parts(simulated.service)
    logs = logs_of(simulated)

    def tracebacks() -> int:
        return sum(
            path.read_text(errors="replace").count("Traceback")
            for path in logs.glob("worker-*.err")
        )

    before, said = parts.pids("replica"), tracebacks()
    with redis_as(simulated, "operator") as redis:
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
@pytest.mark.disturbs
@pytest.mark.timeout(1200)
def test_hostile_bodies_and_floods_are_refused_and_cost_the_others_nothing(
    simulated: Running, unharmed: None
) -> None:
    me = simulated.url, KEYS["zeta"], BODY["model"]
    with Polite(*me) as before:
        time.sleep(8)
    with Polite(*me) as meanwhile, hostile(simulated, "send") as sending:
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
@pytest.mark.disturbs
@pytest.mark.timeout(1200)
def test_a_tenant_that_fills_engines_and_redis_cannot_block_other_tenants(
    simulated: Running, unharmed: None
) -> None:
    small = {**BODY, "stream": True}
    with hostile(simulated, "fill") as filling:
        answers = told(filling)
        statuses = answers["a big body that waits"]
        assert any(status.startswith("429") for status in statuses), answers
        with simulated.client("zeta") as zeta:
            for _ in range(10):
                with zeta.stream("POST", CHAT, json=small) as waiting:
                    assert waiting.status_code == 200, waiting.headers
                    mine = waiting.headers["x-request-id"]
                    state = zeta.delete(f"/v1/requests/{mine}").json()["state"]
                    assert state in ("cancelled", "completed")
        assert filling.stdin is not None
        filling.stdin.close()
    with simulated.client("zeta") as zeta:
        until("the places are free", lambda: zeta.post(CHAT, json=BODY).status_code == 200)
