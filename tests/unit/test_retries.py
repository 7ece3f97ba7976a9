"""What follows a lost attempt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.contract import Cause
from serve_app.dispatch.attempts import BLAMED, Next, after_loss
from tests.tables import each

POISON_AFTER = 3
CAUSES = st.sampled_from(Cause)


def test_a_lost_attempt_is_followed_by_one_of_the_next_epoch() -> None:
    assert after_loss([""], 1, Cause.LOST, Next(1), POISON_AFTER) == Next(2, Cause.LOST)
    assert after_loss([""], 7, Cause.DRAINED, None, POISON_AFTER) == Next(8, Cause.DRAINED)


def test_the_last_chance_is_taken_alone_and_no_other_follows() -> None:
    assert after_loss(["", "hung"], 2, Cause.LOST, Next(2), POISON_AFTER) == Next(
        3, Cause.LOST, quarantined=True
    )
    assert after_loss(["", "hung", "lost"], 3, Cause.HUNG, Next(3), POISON_AFTER) is None


@each("cause", [cause for cause in Cause if cause not in BLAMED])
def test_what_no_request_can_be_blamed_for_does_not_count(cause: Cause) -> None:
    opened = ["", *[cause] * 9, "lost", "lost"]
    assert after_loss(opened, 12, cause, Next(12), POISON_AFTER) == Next(13, cause, 0, True)


def test_an_unopened_attempt_is_repeated_and_does_not_count() -> None:
    tried = Next(3, Cause.LOST, quarantined=True)
    again = after_loss(["", "lost"], 2, Cause.LOST, tried, POISON_AFTER)
    assert again == tried._replace(refused=1)
    assert after_loss(["", "lost"], 2, Cause.NOT_OPENED, again, POISON_AFTER) == (
        tried._replace(refused=2)
    )
    assert after_loss([], 0, Cause.LOST, Next(1), 1) == Next(1, refused=1)


@given(st.lists(CAUSES, max_size=30), st.integers(1, 5))
def test_no_request_takes_down_more_than_it_may(causes: list[Cause], poison_after: int) -> None:
    this, opened, losses = Next(1), list[str](), 0
    for cause in causes:
        opened.append(this.cause or "")
        following = after_loss(opened, this.epoch, cause, this, poison_after)
        losses += cause in BLAMED
        assert (following is None) == (losses >= poison_after)
        if following is None:
            break
        assert following.epoch == this.epoch + 1
        assert following.quarantined == (losses == poison_after - 1 and losses > 0)
        this = following
