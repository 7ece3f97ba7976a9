"""The demo's verdict, and its pictures; tests/service/test_demo.py runs it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.demo import turn
from serve_app.demo.__main__ import findings
from serve_app.demo.faults import Upgrade
from serve_app.demo.screen import Pane, Recording
from tests.tables import each

PART = {"summary": "a", "evidence": "b", "owner": "c", "severity": "low", "minutes": 1}
WHOLE = json.dumps({f"part {n}": {**PART, "command": "d"} for n in range(10)})


class Ended(turn.Turn):
    """An answer that has come."""

    def __init__(self, arguments: str = WHOLE, tokens: int = 7, failure: str = "") -> None:
        super().__init__(None, {})  # type: ignore[arg-type]  # nobody asks
        self.arguments, self.tokens, self.failure = arguments, tokens, failure


class Replaced(Upgrade):
    """An upgrade that has ended."""

    def __init__(self, before: set[int], after: set[int], answers: bool = True) -> None:
        self.before, self._after, self.version = before, after, "next"
        self._answers = answers

    def running(self) -> set[int]:
        return self._after

    def serves(self) -> bool:
        return self._answers


GOOD: dict[str, Any] = {
    "answer": Ended(),
    "booked": {"num_model_requests": 1, "output_tokens": 7},
    "upgrade": Replaced({1, 2}, {3, 4}),
}


def broken(**wrong: Any) -> set[str]:
    """The promises that were not kept."""
    found = findings(Ended(), recomputed=3, **{**GOOD, **wrong})
    return {words for words, kept in found if not kept}


def test_a_good_run_keeps_every_promise() -> None:
    assert broken() == set()


@each(
    "wrong",
    [
        {"answer": Ended(WHOLE[:-1])},
        {"answer": Ended(WHOLE.replace('"a"', '"b"', 1))},
        {"answer": Ended(tokens=8)},
        {"answer": Ended(failure="APIError: peer closed connection")},
        {"booked": {"num_model_requests": 2, "output_tokens": 14}},
        {"booked": {"num_model_requests": 0, "output_tokens": 0}},
        {"upgrade": Replaced({1, 2}, {2, 3})},
        {"upgrade": Replaced({1, 2}, {3, 4}, answers=False)},
    ],
)
def test_a_promise_that_was_broken_is_said(wrong: dict[str, Any]) -> None:
    assert broken(**wrong)


def test_a_line_that_is_full_does_not_change() -> None:
    pane = Pane("", 14)  # ten characters, and the frame
    pane.add("0123456")
    pane.mark("kill")
    pane.add("89" * 6)
    assert [line.plain for line in pane._lines] == ["0123456 ki", "ll 8989898", "98989"]


def test_a_recording_has_each_picture_once(tmp_path: Path) -> None:
    out = io.StringIO()
    recording = Recording(out)
    for text in ("before", "one", "one", "two"):
        recording.write(text)
        if text == "before":
            recording.begin()
    recording.save(tmp_path / "cast", "t")
    header, *frames = map(json.loads, (tmp_path / "cast").read_text().splitlines())
    assert header["version"] == 2
    assert [text for _, _, text in frames] == ["one", "two"]
    assert out.getvalue() == "beforeoneonetwo"


def test_an_end_that_comes_too_early_is_told_to_who_waits() -> None:
    answer = Ended()
    answer.has_ended = True
    with pytest.raises(turn.Ended):
        answer.wait_for_more(1)
