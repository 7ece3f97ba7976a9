"""What the last release leaves in Redis, kept for the tests of the next one.

    export HERMES_KEEP_SERVICES=/tmp/kept
    .venv/bin/python -m pytest tests/service/test_upgrade.py -k scaling
    .venv/bin/python -m tests.service.versions /tmp/kept/simulated

writes `tests/service/versions/<version>.json` from a running service with the simulated engine.
Commit it with the release, never change it afterwards, and delete that of the release before.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis

import serve_app
from serve_app.local.service import Service
from tests.service.services import KEYS
from tests.service.support import Running, Stream
from tests.waiting import until

FOLDER = Path(__file__).with_name("versions")
PROMPT, TOKENS = "What did you leave behind?", 300

Fields = dict[bytes, bytes]


class Left(NamedTuple):
    """A journal's entries, its entry in a queue, and its body, empty once the request has ended."""

    request_id: str
    entries: list[tuple[str, Fields]]
    queue: str
    queued: Fields
    body: bytes

    def put_back(self, redis: Redis, tenant: str, entries: int | None = None) -> None:
        """As if this tenant had just left it: the first `entries` of the journal, and the queue's
        entry.

        Nothing else is changed but times: a deadline that is years ago would be another test.
        """
        key, deadline_ms = f"hermes:j:{self.request_id}", int(time.time() * 1000) + 600_000
        redis.delete(key)
        for entry_id, fields in self.entries[:entries]:
            changed: Any = {
                name: value.replace(b'"tenant":"default"', f'"tenant":"{tenant}"'.encode())
                for name, value in fields.items()
            }
            if entry_id == "0-1":
                changed[b"m"] = json.dumps(
                    {**json.loads(changed[b"m"]), "deadline_ms": deadline_ms}
                ).encode()
            redis.xadd(key, changed, id=entry_id)
        redis.expire(key, 900)
        redis.delete(f"hermes:b:{self.request_id}")
        if self.body:
            redis.set(f"hermes:b:{self.request_id}", self.body, ex=900)
        if self.queue:
            queued: Any = {**self.queued, b"t": tenant, b"d": str(deadline_ms)}
            redis.xadd(self.queue, queued)


def read(path: Path) -> dict[str, Left]:
    """The journals that a version left: `running`, in the middle of a stream, and `completed`."""
    return {
        name: Left(
            left["request_id"],
            [(e, _bytes(fields)) for e, fields in left["entries"]],
            left["queue"],
            _bytes(left["queued"]),
            base64.b64decode(left["body"]),
        )
        for name, left in json.loads(path.read_text()).items()
    }


def record(service: Running) -> dict[str, Any]:
    """Send requests, and read Redis in the middle and at the end."""
    with service.stream(PROMPT, TOKENS) as response:
        stream = Stream(response)
        stream.next_events(40)
        queue, queued = next(
            (key.decode(), fields)
            for key in service.redis.scan_iter("hermes:q:*")
            for _, fields in service.entries(key.decode())
            if fields[b"r"].decode() == stream.request_id
        )
        running = _left(service, stream.request_id, queue, queued)
        stream.rest()
    until("it has ended", lambda: service.state(stream.request_id)["ended_at_ms"])
    return {"running": running, "completed": _left(service, stream.request_id, "", {})}


def _left(service: Running, request_id: str, queue: str, queued: Fields) -> dict[str, Any]:
    entries = service.entries(service.journal_key(request_id))
    body: Any = service.redis.get(f"hermes:b:{request_id}")
    return {
        "request_id": request_id,
        "entries": [[entry_id.decode(), _text(fields)] for entry_id, fields in entries],
        "queue": queue,
        "queued": _text(queued),
        "body": base64.b64encode(body or b"").decode(),
    }


def _text(fields: Fields) -> dict[str, str]:
    return {name.decode(): base64.b64encode(value).decode() for name, value in fields.items()}


def _bytes(fields: dict[str, str]) -> Fields:
    return {name.encode(): base64.b64decode(value) for name, value in fields.items()}


if __name__ == "__main__":
    kept = Service.load(Path(sys.argv[1]))
    assert kept is not None, "no service was kept there"
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{serve_app.__version__}.json"
    path.write_text(json.dumps(record(Running(kept, KEYS)), indent=1) + "\n")
    print(path)
