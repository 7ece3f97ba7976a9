"""Windows of the day, and durations."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import RequestRefused
from serve_app.policy.day_windows import DayWindow, duration_s
from tests.tables import each

BERLIN = "Europe/Berlin"
MINUTE = 60_000


def at(text: str, zone: str = BERLIN, fold: int = 0) -> int:
    """Unix milliseconds of a time by the clock of a zone; `fold`: 1 for the second time that an
    hour comes.
    """
    there = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold)
    return int(there.timestamp() * 1000)


@each(
    "window, day, open_at, closed_at",
    [
        ("22:00-06:00 Europe/Berlin", "2026-07-01", ("22:00", "23:59", "00:00", "05:59"), "21:59"),
        ("22:00–06:00 Europe/Berlin", "2026-01-01", ("22:00", "05:59"), "06:00"),
        ("9:30 - 17:00 Europe/Berlin", "2026-01-01", ("09:30", "16:59"), "17:00"),
        ("22:00-00:00 Europe/Berlin", "2026-01-01", ("22:00", "23:59"), "00:00"),
    ],
)
def test_a_window_has_its_first_minute_and_not_its_last(
    window: str, day: str, open_at: tuple[str, ...], closed_at: str
) -> None:
    its = DayWindow.parse(window)
    assert all(its.is_open(at(f"{day} {time}")) for time in open_at)
    assert not its.is_open(at(f"{day} {closed_at}"))


def test_without_a_zone_it_is_utc() -> None:
    its = DayWindow.parse("22:00-06:00")
    assert its.is_open(at("2026-07-01 22:00", "UTC"))
    assert not its.is_open(at("2026-07-01 22:00"))


@each(
    "window, now, changes",
    [
        # Where the clock is put forward, at 02:00, the night has seven hours; where it is put
        # back, at 03:00, it has nine.
        ("22:00-06:00", ("2026-03-28 22:00", 0), ("2026-03-29 06:00", 0)),
        ("22:00-06:00", ("2026-10-24 22:00", 0), ("2026-10-25 06:00", 0)),
        # A window that begins in the hour that is left out opens behind it,
        ("02:30-04:00", ("2026-03-28 23:00", 0), ("2026-03-29 03:00", 0)),
        # one that is within that hour on the next day,
        ("02:10-02:50", ("2026-03-28 23:00", 0), ("2026-03-30 02:10", 0)),
        # and one within the hour that comes twice opens twice.
        ("02:10-02:50", ("2026-10-25 01:00", 0), ("2026-10-25 02:10", 0)),
        ("02:10-02:50", ("2026-10-25 02:55", 0), ("2026-10-25 02:10", 1)),
    ],
)
def test_the_clock_on_the_wall_counts_where_it_is_changed(
    window: str, now: tuple[str, int], changes: tuple[str, int]
) -> None:
    its = DayWindow.parse(f"{window} {BERLIN}")
    found = its.next_change_ms(at(now[0], fold=now[1]))
    assert found == at(changes[0], fold=changes[1])


def test_a_night_is_as_long_as_the_change_makes_it() -> None:
    its, hours = DayWindow.parse(f"22:00-06:00 {BERLIN}"), []
    for night in ("2026-03-28", "2026-07-01", "2026-10-24"):
        begin = its.opens_ms(at(f"{night} 12:00"))
        hours.append((its.next_change_ms(begin) - begin) / (60 * MINUTE))
    assert hours == [7, 8, 9]


@given(
    opens=st.integers(0, 24 * 60 - 1),
    minutes=st.integers(1, 24 * 60 - 1),
    zone=st.sampled_from(["UTC", BERLIN, "America/St_Johns", "Asia/Kathmandu", "Pacific/Chatham"]),
    begin=st.datetimes(datetime(2026, 1, 1), datetime(2027, 12, 31)),
)
def test_between_two_changes_it_stays_as_it_is(
    opens: int, minutes: int, zone: str, begin: datetime
) -> None:
    closes = (opens + minutes) % (24 * 60)
    times = (f"{time // 60:02}:{time % 60:02}" for time in (opens, closes))
    its = DayWindow.parse(f"{'-'.join(times)} {zone}")
    now = int(begin.replace(tzinfo=UTC).timestamp() * 1000)
    changes = its.next_change_ms(now)
    assert its.is_open(changes) != its.is_open(changes - 1) == its.is_open(now)
    among = range(now, changes, max(MINUTE, (changes - now) // 50))
    assert {its.is_open(one) for one in among} == {its.is_open(now)}
    assert changes - now <= timedelta(days=2, hours=2) / timedelta(milliseconds=1)
    assert its.is_open(its.opens_ms(now))


@each(
    "text, said",
    [
        ("", "22:00-06:00 Europe/Berlin"),
        ("22-06", "22:00-06:00 Europe/Berlin"),
        ("24:00-06:00", "22:00-06:00 Europe/Berlin"),
        ("22:60-06:00", "22:00-06:00 Europe/Berlin"),
        ("22:00-06:00 ../../etc/passwd", "22:00-06:00 Europe/Berlin"),
        ("22:00-06:00 Europe", "no time zone 'Europe'"),
        ("22:00-06:00 Europe/Nowhere", "no time zone 'Europe/Nowhere'"),
        ("22:00-06:00 A" + "a" * 63, "no time zone"),
        ("22:00-06:00 " + "a" * 65, "22:00-06:00 Europe/Berlin"),
        ("22:00-22:00 UTC", "it closes when it opens"),
    ],
)
def test_a_window_that_is_none_is_refused_with_its_field(text: str, said: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        DayWindow.parse(text)
    assert (refused.value.status, refused.value.param) == (400, "window")
    assert said in refused.value.message


@each(
    "text, seconds",
    [("1m", 60), ("90m", 5_400), ("24h", 86_400), ("2d", 172_800), ("168h", 604_800)],
)
def test_a_duration_is_in_minutes_hours_or_days(text: str, seconds: int) -> None:
    assert duration_s(text) == seconds


@each("text", ["", "0m", "24", "h", "1.5h", "-1h", "8d", "10081m", "9999999m", "24H", "24h ", "٢h"])
def test_any_other_duration_is_refused_with_its_field(text: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        duration_s(text)
    assert (refused.value.status, refused.value.param) == (400, "completion_window")
    assert "1m to 7d" in refused.value.message


@each(
    "window, since, until, hours",
    [
        ("22:00-06:00", "2026-07-01 12:00", "2026-07-01 20:00", 0.0),
        ("22:00-06:00", "2026-07-01 05:00", "2026-07-01 23:30", 2.5),
        ("22:00-06:00", "2026-07-01 00:00", "2026-07-08 00:00", 56.0),
        ("09:00-17:00", "2026-07-01 16:30", "2026-07-02 09:15", 0.75),
        ("22:00-06:00", "2026-03-28 22:00", "2026-03-29 12:00", 7.0),
        ("22:00-06:00", "2026-10-24 22:00", "2026-10-25 12:00", 9.0),
        ("22:00-06:00", "2026-07-02 00:00", "2026-07-01 00:00", 0.0),
    ],
)
def test_the_time_in_which_it_is_open(window: str, since: str, until: str, hours: float) -> None:
    its = DayWindow.parse(f"{window} {BERLIN}")
    assert its.open_s(at(since), at(until)) == hours * 3_600
