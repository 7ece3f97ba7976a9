"""Requests that keep their turns while there is no room for them never wait for each other."""

from __future__ import annotations

import random

import pytest

from serve_app.contract import EngineReport, Written
from serve_app.policy.order import Scheduler
from serve_app.policy.running import Running
from tests.tables import each
from tests.unit.virtual_order import Entry

KV_TOKENS = 2_000
READING_MS = 500
LONG_MS = 200_000


class Ingress:
    """A scheduler, what runs, and the time."""

    def __init__(self) -> None:
        self.order = Scheduler[Entry]()
        self.order.capacity = 1_000
        self.running: list[Running[Entry]] = []
        self.now_ms = 0
        self.read()

    def read(self) -> None:
        """The engines report, twice a second."""
        self.now_ms += READING_MS
        self.order.room_changed([EngineReport("e", KV_TOKENS, 4096)], KV_TOKENS, 0)
        self.fill()

    def fill(self) -> None:
        while (started := self.order.next(self.now_ms)) is not None:
            self.running.append(started)

    def arrives(self, request_class: str, tenant: str, prompt_tokens: int) -> None:
        self.now_ms += 100
        self.order.add(Entry(request_class, self.now_ms, tenant, prompt_tokens, 1, 1))
        self.fill()

    def one_ends(self) -> None:
        self.now_ms += 100
        self.order.ended(self.running.pop(0), Written(1), self.now_ms)
        self.fill()

    def drain(self) -> None:
        """Whoever runs ends, one at a time; nothing new arrives."""
        while self.running or len(self.order):
            idle_since_ms = self.now_ms
            while not self.running:
                self.read()
                assert self.now_ms - idle_since_ms < LONG_MS, f"frozen with {list(self.order)}"
            self.one_ends()


def test_two_that_keep_their_turns_do_not_wait_for_each_other() -> None:
    its = Ingress()
    its.arrives("standard", "b", 1_500)
    its.arrives("standard", "b", 900)
    its.arrives("standard", "a", 600)
    its.arrives("batch", "a", 1_500)
    its.arrives("standard", "b", 300)
    its.drain()


@pytest.mark.parametrize("rounds", [100, pytest.param(400, marks=pytest.mark.nightly)])
@each(
    "classes",
    [
        ("standard", "batch"),
        ("realtime", "standard"),
        ("realtime", "standard", "batch"),
        ("critical", "realtime", "standard", "batch"),
    ],
)
def test_whatever_comes_everything_starts(classes: tuple[str, ...], rounds: int) -> None:
    chance = random.Random(1)
    for _ in range(rounds):
        its = Ingress()
        for _ in range(chance.randint(4, 24)):
            if its.running and chance.random() < 0.25:
                its.one_ends()
            else:
                prompt_tokens = chance.choice((300, 600, 900, 1_500, 1_900))
                its.arrives(chance.choice(classes), chance.choice("ab"), prompt_tokens)
        its.drain()
