"""When the lines of a batch may begin, and how long they have: windows of the day, as
`22:00–06:00 Europe/Berlin`, and durations, as `90m`, `24h` or `7d`. Pure.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

from serve_app.errors import invalid_value

_TIME = r"([01]?\d|2[0-3]):([0-5]\d)"
_WINDOW = re.compile(rf"\s*{_TIME}\s*[-–]\s*{_TIME}(?:\s+([A-Za-z][\w+/-]{{0,63}}))?\s*", re.ASCII)
_DURATION = re.compile(r"([1-9]\d{0,5})([mhd])", re.ASCII)
_SECONDS = {"m": 60, "h": 3_600, "d": 86_400}
_LONGEST = 7 * _SECONDS["d"]
_MINUTE = 60_000
"""Milliseconds."""
_LOOKED_AT_MINUTES = 3 * 24 * 60
"""A window whose hours the change to summer time leaves out opens only on the next day."""


class DayWindow(NamedTuple):
    """The same hours of every day by the clock on the wall: where that is put back, an hour comes
    twice, and where it is put forward, the hours that it leaves out never come.
    """

    opens: int
    """Minutes after midnight."""
    closes: int
    """The same; less than `opens` if midnight is within."""
    zone: ZoneInfo

    @classmethod
    def parse(cls, text: str, param: str = "window") -> DayWindow:
        """A window as a client writes it; without a time zone it is UTC. Raises `RequestRefused`,
        which names the field `param`.
        """
        found = _WINDOW.fullmatch(text)
        if found is None:
            raise invalid_value(param, "it must be like '22:00-06:00 Europe/Berlin'")
        *times, name = found.groups()
        begin_h, begin_m, end_h, end_m = map(int, times)
        try:
            zone = ZoneInfo(name or "UTC")
        except (LookupError, ValueError, OSError):
            raise invalid_value(param, f"there is no time zone '{name}'") from None
        opens, closes = begin_h * 60 + begin_m, end_h * 60 + end_m
        if opens == closes:
            raise invalid_value(param, "it closes when it opens; leave it out if it is always open")
        return cls(opens, closes, zone)

    def is_open(self, at_ms: int) -> bool:
        """At a time in Unix milliseconds."""
        there = datetime.fromtimestamp(at_ms / 1000, self.zone)
        minute = there.hour * 60 + there.minute
        if self.opens < self.closes:
            return self.opens <= minute < self.closes
        return minute >= self.opens or minute < self.closes

    def next_change_ms(self, at_ms: int) -> int:
        """When it opens or closes next, in Unix milliseconds. Looks at one minute after the other,
        of a day usually, in about a millisecond.
        """
        now, first = self.is_open(at_ms), at_ms // _MINUTE + 1
        later = (minute * _MINUTE for minute in range(first, first + _LOOKED_AT_MINUTES))
        return next(one for one in later if self.is_open(one) != now)

    def opens_ms(self, at_ms: int) -> int:
        """From when on it is open; `at_ms` if it is open then."""
        return at_ms if self.is_open(at_ms) else self.next_change_ms(at_ms)

    def open_s(self, from_ms: int, until_ms: int) -> float:
        """For how many seconds it is open between two times. An opening in an hour that comes twice
        or never counts as if the clock were not changed.
        """
        day = datetime.fromtimestamp(from_ms / 1000, self.zone).date() - timedelta(days=1)
        last, found_ms = datetime.fromtimestamp(until_ms / 1000, self.zone).date(), 0.0
        while day <= last:
            closes_on = day + timedelta(days=self.closes < self.opens)
            begin_ms, end_ms = self._at_ms(day, self.opens), self._at_ms(closes_on, self.closes)
            found_ms += max(0.0, min(end_ms, until_ms) - max(begin_ms, from_ms))
            day += timedelta(days=1)
        return found_ms / 1000

    def _at_ms(self, day: date, minutes: int) -> float:
        return datetime.combine(day, time(*divmod(minutes, 60)), self.zone).timestamp() * 1000


def duration_s(text: str, param: str = "completion_window") -> int:
    """Seconds of a duration from a minute to seven days, as `90m`, `24h` or `2d`. Raises
    `RequestRefused`, which names the field `param`.
    """
    found = _DURATION.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST:
        raise invalid_value(param, "it must be a duration from 1m to 7d, such as 90m, 24h or 2d")
    return seconds
