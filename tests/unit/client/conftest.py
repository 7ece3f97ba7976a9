"""Every test of the client runs with both transports, and with pauses that take no time."""

from __future__ import annotations

import time

import pytest

from serve_app import client
from tests.unit.client.callers import Asyncio, Blocking, Kind


@pytest.fixture(params=[Blocking, Asyncio])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


class Clock:
    """The client's clock, in place of `time`: it stands still, or goes on with every failure."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step_s = 0.0

    sleep = staticmethod(time.sleep)

    def monotonic(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Unless a test moves it, the client never gives up, however slow the machine is."""
    made = Clock()
    monkeypatch.setattr(client, "time", made)
    return made


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses take no time, except in the test of the pauses."""
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.01)
