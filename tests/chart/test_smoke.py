"""`helm test`'s script, against a server that answers like the service, and against servers that do
not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from serve_app.journal.events import DONE
from tests.chart.charts import CHART
from tests.http_server import Asked, Script, Wire, event, serving, whole
from tests.tables import each

KEY = "the-key"
CHUNK = {"choices": [{"delta": {"content": "hi"}, "finish_reason": None}]}
LAST = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def service(fault: str) -> Script:
    """A service with a defect, if one is named."""

    def play(asked: Asked, wire: Wire) -> None:
        known = asked.headers.get("authorization") == f"Bearer {KEY}" or fault == "open door"
        if asked.path == "/readyz" and fault == "not ready":
            wire.send(whole(503, b"{}"))
        elif asked.path.startswith("/v1/") and not known:
            wire.send(whole(401, b"{}"))
        elif asked.method == "GET":
            wire.send(whole(200, json.dumps({"data": [{"id": "big"}]}).encode()))
        else:
            assert json.loads(asked.body)["stream"]
            events = [event(CHUNK), event(LAST), *([] if fault == "cut short" else [DONE])]
            sent = [b"id: %d\n%b" % pair for pair in enumerate(events, 1)]
            wire.send(whole(200, b"".join(sent), "text/event-stream"))

    return play


def smoke(fault: str, seconds: str = "60") -> subprocess.CompletedProcess[str]:
    with serving(service(fault)) as server:
        given = {
            "HERMES_URL": server.url,
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
        ("open door", "failed: a wrong key is refused"),
        ("cut short", "failed: a streamed completion ends in [DONE]"),
    ],
)
def test_it_fails_and_says_why(fault: str, sentence: str) -> None:
    done = smoke(fault, seconds="0.5" if fault == "not ready" else "60")
    assert done.returncode == 1
    assert sentence in done.stderr
