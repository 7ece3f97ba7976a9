"""Pauses, deadlines and events of the client in isolation, and what importing it needs."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.client import EventSplitter, RetryClock
from serve_app.ingress.protocol_events import COMMENT
from serve_app.journal.events import after_event
from tests.http_server import chunk, cutting, serving
from tests.unit.client.service import EVENTS, ROOT, TEXTS, answer, first, streaming


def test_pauses_are_spread_evenly_below_a_bound_that_doubles_to_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    random.seed(1)
    rows = [
        [RetryClock.pause_s(clock) or 0.0 for _ in range(7)]
        for clock in (RetryClock(60.0) for _ in range(500))
    ]
    for pauses_s, bound_s in zip(
        zip(*rows, strict=True), (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0), strict=True
    ):
        assert 0.95 * bound_s < max(pauses_s) <= bound_s
        assert 0.0 <= min(pauses_s) < 0.05 * bound_s
        assert sum(pauses_s) / len(pauses_s) == pytest.approx(bound_s / 2, rel=0.15)


@given(st.integers())
def test_events_come_whole_once_and_in_order_however_their_bytes_and_connections_are_cut(
    seed: int,
) -> None:
    chance = random.Random(seed)
    events = [*EVENTS[:2], COMMENT, *EVENTS[2:]]
    splitter, found = EventSplitter(), list[bytes]()
    for _ in range(100):
        if splitter.finished:
            break
        behind = chance.randint(0, splitter.last)  # a service that sends more again than it has to
        body = after_event(b"".join(events), 1, behind)
        body = body[: chance.randint(0, 2 * len(body))]
        while body:
            size = chance.randint(1, 40)
            found += splitter.feed(body[:size])
            body = body[size:]
        splitter.part = b""
    assert [event for event in found if event != b": waiting\n"] == EVENTS


def test_the_client_needs_httpx_and_nothing_else() -> None:
    code = """
import sys
import httpx
before = set(sys.modules)
import serve_app.client
print(*sorted(set(sys.modules) - before - set(sys.stdlib_module_names)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert packages - set(sys.stdlib_module_names) == {"serve_app"}
    assert "serve_app.ingress" not in done.stdout


def test_an_sdk_on_httpx2_can_use_it_through_the_alias_of_httpx2() -> None:
    code = """
import sys
import httpx2
httpx2.alias_httpx()
import openai
from serve_app.client import ReconnectingTransport
http = openai.DefaultHttpx2Client(transport=ReconnectingTransport())
sdk = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="k", http_client=http, max_retries=0)
for part in sdk.chat.completions.create(model="m", messages=[], stream=True):
    print(ascii(part.choices[0].delta.content))
"""
    broken = cutting(streaming() + chunk(EVENTS[0] + EVENTS[1][:-9]))
    with serving(first(broken, lambda asked, wire: wire.send(answer(asked, EVENTS)))) as service:
        command = [sys.executable, "-c", code, service.url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [ascii(text) for text in TEXTS]
    assert [asked.method for asked in service.asked] == ["POST", "GET"]
