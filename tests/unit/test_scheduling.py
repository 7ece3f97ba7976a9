"""The order of work among claimed requests."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from serve_app.scheduling.order import CLASSES, DEFAULT_CLASS, SERVICE_TIERS, in_order


@dataclass(frozen=True)
class Claimed:
    request_class: str
    enqueued_ms: int


def test_urgent_classes_go_first_and_within_a_class_the_oldest() -> None:
    batch, urgent = Claimed("batch", 1), Claimed("realtime", 9)
    old, new = Claimed("standard", 2), Claimed("standard", 3)
    assert in_order([new, batch, urgent, old]) == [urgent, old, new, batch]


@given(st.lists(st.builds(Claimed, st.sampled_from(CLASSES), st.integers(0, 5))))
def test_everything_that_was_claimed_is_worked_on_once(claimed: list[Claimed]) -> None:
    ordered = in_order(claimed)
    assert sorted(map(id, ordered)) == sorted(map(id, claimed))
    keys = [(CLASSES.index(item.request_class), item.enqueued_ms) for item in ordered]
    assert keys == sorted(keys)


def test_every_service_tier_has_a_class() -> None:
    assert set(SERVICE_TIERS.values()) <= set(CLASSES)
    assert DEFAULT_CLASS in CLASSES
