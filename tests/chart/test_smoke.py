"""`helm test`'s script, against a server that answers like the service, and against servers that do
not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.chart.charts import CHART, NAMED, documents, one
from tests.tables import each

KEY = "the-key"
CHUNK = {"choices": [{"delta": {"content": "hi"}, "finish_reason": None}]}
LAST = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


class Service(BaseHTTPRequestHandler):
    """A fake service; `fault` names its defect."""

    fault = ""

    def do_GET(self) -> None:
        if self.path == "/readyz" and self.fault == "not ready":
            return self.answer(503, {})
        if self.path == "/v1/models" and not self.allowed():
            return self.answer(401, {})
        self.answer(200, {"data": [{"id": "other" if self.fault == "another model" else "big"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.allowed() or not body["stream"]:
            return self.answer(401, {})
        events = [CHUNK] if self.fault == "no finish reason" else [CHUNK, LAST]
        texts = [*map(json.dumps, events), *([] if self.fault == "cut short" else ["[DONE]"])]
        self.answer(200, "".join(f"id: {n}\ndata: {text}\n\n" for n, text in enumerate(texts, 1)))

    def allowed(self) -> bool:
        return self.fault == "open door" or self.headers.get("authorization") == f"Bearer {KEY}"

    def answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(fault: str) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Faulty", (Service,), {"fault": fault}))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def smoke(fault: str, seconds: str = "60") -> subprocess.CompletedProcess[str]:
    with serving(fault) as url:
        given = {
            "HERMES_URL": url,
            "HERMES_API_KEY": KEY,
            "HERMES_MODEL": "big",
            "HERMES_TEST_SECONDS": seconds,
        }
        return subprocess.run(
            [sys.executable, str(CHART / "files" / "smoke.py")],
            env={**os.environ, **given},
            capture_output=True,
            text=True,
        )


def test_it_passes_where_all_is_well() -> None:
    done = smoke("")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok: ") == 6


@each(
    "fault, sentence",
    [
        ("not ready", "not ready in time"),
        ("another model", "failed: serves big"),
        ("open door", "failed: a wrong key is refused"),
        ("cut short", "failed: a streamed completion ends in [DONE]"),
        ("no finish reason", "failed: it has a finish reason"),
    ],
)
def test_it_fails_and_says_why(fault: str, sentence: str) -> None:
    done = smoke(fault, seconds="0.5" if fault == "not ready" else "60")
    assert done.returncode == 1
    assert sentence in done.stderr


def test_the_pod_gets_what_the_script_asks_for() -> None:
    pod = one(documents(NAMED), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    variables = {item["name"]: item for item in pod["spec"]["containers"][0]["env"]}
    assert set(variables) == {
        "HERMES_URL",
        "HERMES_API_KEY",
        "HERMES_MODEL",
        "HERMES_TEST_SECONDS",
        "NVIDIA_VISIBLE_DEVICES",
    }
    assert variables["HERMES_URL"]["value"] == "http://hermes-serve-svc:8000"
    assert variables["HERMES_API_KEY"]["valueFrom"]["secretKeyRef"] == {
        "name": "hermes-keys",
        "key": "test-key",
    }
    script = one(documents(NAMED), "ConfigMap", "hermes-test")["data"]["smoke.py"]
    assert script.strip() == (CHART / "files" / "smoke.py").read_text().strip()
