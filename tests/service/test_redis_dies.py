"""Redis is killed with SIGKILL and restarted: new requests are told to retry later, and running
streams lose nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from scripts.local import ports, processes, redis_server
from tests.running_time import RunningTime
from tests.service.disturbance import on_disk
from tests.service.support import Running, Stream, answers, asking, events_of, text_of
from tests.waiting import until

# In the gate: test_what_dies.py kills Redis, too.
pytestmark = [pytest.mark.nightly, pytest.mark.outage, pytest.mark.disturbs]

STORM, TOKENS = "Tell me a story about a storm.", 2500


def kill(service: Running) -> None:
    """Kill it without a shutdown, like a power cut."""
    pid = service.service.pids["redis"]
    os.kill(pid, signal.SIGKILL)
    port = urlsplit(service.service.redis_url).port or 0
    # Its threads end one by one; the last of them lets go of the port.
    until("Redis is gone", lambda: not processes.is_alive(pid) and not ports.is_taken(port))


def start(service: Running) -> None:
    """Start it on the same folder and port."""
    port = urlsplit(service.service.redis_url).port
    folder = Path(service.service.state_dir) / "redis"
    service.service.pids["redis"] = redis_server.start(folder, port).pid
    service.service.save()


def ready(service: Running) -> bool:
    return service.http.get("/readyz").status_code == 200


@pytest.mark.clock
def test_a_redis_that_dies_and_comes_back_costs_a_stream_a_pause_and_not_a_byte(
    service: Running,
) -> None:
    service.until_idle()
    undisturbed = service.text(STORM, TOKENS)
    streams: list[Stream] = []
    begun = threading.Barrier(5, timeout=240)

    def read() -> None:
        with service.stream(STORM, TOKENS) as response:
            stream = Stream(response)
            streams.append(stream)
            stream.next_events(20)
            begun.wait()
            stream.rest()

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    begun.wait()
    assert all(service.state(stream.request_id)["state"] == "running" for stream in streams)
    on_disk(service)
    kill(service)
    try:
        probes = [f"{url}/readyz" for url in service.ingress_urls.values()]

        def both_say_so() -> bool:
            return all(httpx.get(probe, timeout=60).status_code == 503 for probe in probes)

        until("both say so", both_say_so)
        answer = service.http.get("/readyz")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert "Redis" in answer.json()["problem"]
        assert service.http.get("/healthz").status_code == 200
        with pytest.raises(openai.InternalServerError) as caught:
            service.sdk.chat.completions.create(**asking())
        assert caught.value.status_code == 503
        assert caught.value.response.headers["x-hermes-reason"] == "journal_unavailable"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        for url in service.ingress_urls.values():
            answer = httpx.get(f"{url}/v1/requests/{streams[0].request_id}", timeout=120)
            assert answer.status_code == 503
            assert answer.headers["x-hermes-reason"] == "journal_unavailable"
            assert httpx.get(f"{url}/metrics", timeout=120).status_code == 200
            assert httpx.get(f"{url}/v1/models", timeout=120).status_code == 200
    finally:
        start(service)
    until("it recovers by itself", lambda: ready(service))
    for reader in readers:
        reader.join(400)
    for stream in streams:
        events = [block for _, block in stream.arrivals if not block.startswith(":")]
        assert text_of(events_of("\n\n".join(events))) == undisturbed
        assert service.state(stream.request_id)["state"] == "completed"
        again = httpx.get(f"{service.url}/v1/requests/{stream.request_id}/events", timeout=240).text
        assert again.split("\n\n")[:-1] == events
    service.until_idle()
    assert service.text(STORM, 12)


@pytest.mark.clock
def test_a_redis_that_comes_back_empty_serves_new_requests(service: Running) -> None:
    service.until_idle()
    kill(service)
    for file in (Path(service.service.state_dir) / "redis").glob("append*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    start(service)
    until("it recovers by itself", lambda: ready(service))
    with RunningTime() as running:
        until("it answers", lambda: answers(service.url))
        assert running.now_s() < 30
    service.until_idle()
