"""How many jobs ran at a time, as a mean over time. Pure."""


class Occupancy:
    """Fed with every change of a number; knows its mean from the first change on."""

    def __init__(self, now_s: float) -> None:
        self._started_s = self._changed_s = now_s
        self._value = 0.0
        self._area = 0.0

    def note(self, now_s: float, value: float) -> None:
        """The number is ``value`` from ``now_s`` on."""
        self._area += self._value * (now_s - self._changed_s)
        self._changed_s, self._value = now_s, value

    def mean(self, now_s: float) -> float:
        """The mean from the start to ``now_s``; 0 if no time has passed."""
        passed_s = now_s - self._started_s
        area = self._area + self._value * (now_s - self._changed_s)
        return area / passed_s if passed_s > 0 else 0.0
