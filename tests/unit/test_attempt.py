"""Engine outputs and response bytes become entries: complete when pulled, all there at the end,
silent after a failure.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.clock import RedisClock
from serve_app.contract import Cause, Reason, State
from serve_app.errors import RequestRefused
from serve_app.journal.attempt_log import AttemptLog
from serve_app.journal.entries import (
    AttemptFacts,
    Entry,
    Head,
    RequestFacts,
    Summary,
    decode_facts,
)
from serve_app.journal.reader import Ending
from serve_app.journal.usage import Usage
from serve_app.observability.metrics import Telemetry
from serve_app.settings.sections import JournalSettings
from tests.tables import each
from tests.transcripts import transcript
from workers.attempt import Attempt
from workers.replay import AnswerTooLarge, Output, Recorded

FACTS = RequestFacts("standard", "t", "s", "m", True, 1, 2, "wake")
OPENED = AttemptFacts("replica-1", "engine-1", 5)


class Scene:
    """An attempt whose entries can be inspected."""

    def __init__(self, recorded: Recorded | None = None, **settings: int) -> None:
        self.journal = AttemptLog("req", "key", 1, b"nonce", "", lambda _: None)
        self.journal.settings = JournalSettings().model_copy(update=settings)
        self.telemetry = Telemetry()
        self.attempt = Attempt(self.journal, FACTS, OPENED, self.telemetry, RedisClock(), recorded)

    async def start(
        self, content_type: str = "text/event-stream; charset=utf-8", status: int = 200
    ) -> None:
        headers = [(b"Content-Type", content_type.encode()), (b"x-secret", b"1")]
        await self.attempt.send(
            {"type": "http.response.start", "status": status, "headers": headers}
        )

    async def body(self, body: bytes, more: bool = True) -> None:
        await self.attempt.send({"type": "http.response.body", "body": body, "more_body": more})

    def output(
        self, text: str, token: int, finish: str | None = None, cached: int | None = None
    ) -> None:
        self.attempt.record(0, text, [token], finish, None, cached)

    async def recorded(self, text: str = "a", token: int = 1, cached: int | None = None) -> None:
        """An output, its bytes, and that the next output is pulled."""
        self.output(text, token, cached=cached)
        await self.body(b"data: %b\n\n" % text.encode())
        self.attempt.flush_previous()

    def written(self) -> Entry:
        """The entry that is appended now."""
        entry = self.journal.take()
        assert entry is not None
        self.journal.accepted(entry)
        return entry

    def ended(self) -> tuple[Entry, Entry]:
        """The last output and the terminal entry, which are appended together."""
        last = self.written()
        assert self.journal.ending is not None
        return last, self.journal.ending[0]

    @property
    def silent(self) -> bool:
        """Whether there is nothing to append."""
        return self.journal.take() is None


@pytest.fixture
async def s() -> Scene:
    return Scene()


async def test_a_record_is_written_when_the_next_output_is_pulled(s: Scene) -> None:
    await s.start()
    s.output("a", 1, cached=7)
    await s.body(b"data: a\n\n")
    assert s.silent
    s.attempt.flush_previous()
    entry = s.written()
    assert entry.body == b"id: 1\ndata: a\n\n"
    assert entry.events == 1
    assert json.loads(entry.fields[b"o"]) == [[0, "a", [1], None, None, 7]]
    kind = ("content-type", "text/event-stream; charset=utf-8")
    assert entry.head == Head(200, [kind])
    await s.recorded("b", 2, cached=7)
    entry = s.written()
    assert (entry.head, entry.events) == (None, 2), "the first alone has it"
    assert json.loads(entry.fields[b"o"])[0][5] is None


async def test_an_entry_says_what_the_outputs_up_to_it_have_used(s: Scene) -> None:
    await s.start()
    s.attempt.read(7, 3)
    await s.recorded("a", 1)
    await s.recorded("b", 2)
    s.output("c", 3)  # its record is not complete
    assert s.written().used == b"7 3 2 0 0"


async def test_the_bytes_behind_the_last_output_ride_with_the_end(s: Scene) -> None:
    await s.start()
    await s.recorded()
    s.written()
    s.output("b", 2, "stop")
    await s.body(b"data: b\n\n")
    await s.body(b"data: [DONE]\n\n", more=False)
    assert s.silent
    s.attempt.stop()
    last, terminal = s.ended()
    assert terminal.terminal
    assert last.body == b"id: 2\ndata: b\n\nid: 3\ndata: [DONE]\n\n"
    assert terminal.events == 3
    assert json.loads(last.fields[b"o"]) == [[0, "b", [2], "stop", None, None]]
    assert transcript(terminal) == b"id: 1\ndata: a\n\n" + last.body
    assert terminal.head is not None  # a compacted journal has no other place for it
    summary = decode_facts(terminal, Summary)
    assert (summary.request, summary.attempt) == (FACTS, OPENED)
    assert (summary.attempts, Usage.decode(terminal.used).output) == (1, 2)
    assert summary.first_output_ms is not None


async def test_events_before_the_first_output_wait_for_it(s: Scene) -> None:
    """Until then the engine may refuse the request, and nothing may be sent that is no error."""
    await s.start()
    await s.body(b"event: response.created\ndata: {}\n\n")
    assert s.silent
    await s.recorded("a", 1)
    assert s.written().body == b"id: 1\nevent: response.created\ndata: {}\n\nid: 2\ndata: a\n\n"


async def test_a_response_that_is_no_stream_is_kept_as_it_is(s: Scene) -> None:
    await s.start("application/json")
    s.output("a", 1)
    s.attempt.flush_previous()
    first = s.written()
    assert (first.body, first.head) == (b"", None)
    s.output("b", 2, "stop")
    await s.body(b'{"a": 1}\n\n', more=True)
    await s.body(b"{}", more=False)
    s.attempt.stop()
    last, terminal = s.ended()
    assert transcript(terminal) == last.body == b'{"a": 1}\n\n{}'
    assert terminal.events == 0


async def test_nothing_is_sent_once_broken_but_what_was_pulled_before(s: Scene) -> None:
    await s.start()
    await s.recorded()
    s.output("b", 2)
    await s.body(b"data: b\n\n")
    s.attempt.stop(Cause.ENGINE_FAILED)
    await s.body(b'data: {"error": "engine died"}\n\n')
    await s.body(b"data: [DONE]\n\n", more=False)
    s.output("c", 3)  # another sequence of the same request, whose engine does not know yet
    s.attempt.flush_previous()
    assert s.written().body == b"id: 1\ndata: a\n\n"
    assert s.silent


async def test_bytes_that_an_older_attempt_has_written_are_not_written_again() -> None:
    head = Head(200, [("content-type", "text/event-stream")])
    s = Scene(Recorded(body=b"id: 1\ndata: a\n\n", events=1, head=head))
    await s.start()
    await s.body(b"data: a\n\ndata: b\n\n")
    s.attempt.flush_previous()
    assert s.written().body == b"id: 2\ndata: b\n\n"


@pytest.mark.parametrize("already", [0, 80])
async def test_a_stream_that_grows_too_large_ends_the_outputs_count_too(already: int) -> None:
    s = Scene(Recorded(bytes=already), max_answer_bytes=140)
    await s.start()
    for _ in range(0 if already else 2):
        await s.recorded()
        s.written()
    s.output("b", 2)
    await s.body(b"data: %b\n\n" % (b"b" * 50))
    with pytest.raises(AnswerTooLarge):
        s.attempt.flush_previous()
    s.written()
    await s.body(b"data: more\n\n")
    assert s.silent


VLLMS = b'data: {"error":{"message":"No.","type":"BadRequestError","param":null,"code":400}}\n\n'
REFUSED = RequestRefused(Reason.CONTEXT_LENGTH_EXCEEDED, "Too long.", param="messages")


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_what_fails_before_anything_was_sent_has_the_failures_status_and_words(
    s: Scene, kind: str
) -> None:
    await s.start(kind)
    await s.body(b"event: response.created\ndata: {}\n\n")
    await s.body(VLLMS)
    s.attempt.stop(REFUSED)
    last, terminal = s.ended()
    assert last.head == Head(400, [("content-type", "application/json")])
    assert (last.events, terminal.state, terminal.reason) == (0, State.FAILED, REFUSED.reason)
    assert last.body == REFUSED.body()


async def test_a_stream_that_fails_later_ends_with_the_failure_and_no_event_of_vllms(
    s: Scene,
) -> None:
    await s.start()
    await s.recorded("a")
    first = s.written()
    s.output("b", 2)
    await s.body(VLLMS)
    await s.body(b"data: [DONE]\n\n")
    assert not s.attempt.answered
    s.attempt.stop(REFUSED)
    last, terminal = s.ended()
    assert (last.body, last.events, terminal.state) == (b"", first.events, State.FAILED)
    assert (last.head, terminal.reason) == (first.head, REFUSED.reason), "what was sent stays true"
    ending = Ending(State.FAILED, terminal.reason, decode_facts(terminal, Summary))
    assert ending.message == "Too long."


async def test_what_is_count_recompute_is_counted_for_the_request_and_for_the_operator() -> None:
    """The metric counts what this worker does; the request, what all of its attempts did."""
    s = Scene(Recorded(usage=Usage(prompt=7, output=3, recomputed=5)))
    s.attempt.restart()
    assert s.attempt.usage == Usage(recomputed=15)
    s.attempt.count_recompute(4)
    assert s.attempt.usage == Usage(recomputed=19)
    registry = s.telemetry.registry
    assert registry.get_sample_value("hermes_recomputed_tokens_total") == 14


@each(
    "stops, last",
    [
        ((None, REFUSED), State.COMPLETED),
        ((Reason.DEADLINE, Cause.ENGINE_FAILED), State.EXPIRED),
        ((AnswerTooLarge(), None), State.FAILED),
        ((Cause.ENGINE_FAILED, None), Cause.ENGINE_FAILED),
    ],
)
async def test_the_first_stop_counts_and_what_comes_after_it_is_dropped(
    stops: Any, last: State | Cause
) -> None:
    s = Scene()
    await s.start()
    await s.recorded("a")
    for why in stops:
        s.attempt.stop(why)
        await s.recorded("b", 2)
    entry = s.written()
    state = s.journal.ending[0].state if s.journal.ending else None
    assert (state or entry.quit, s.attempt.stopped) == (last, last)
    assert entry.body == b"id: 1\ndata: a\n\n"
    assert s.silent


async def test_a_fenced_attempt_ends_nothing(s: Scene) -> None:
    s.journal.close(fenced=True)
    s.attempt.stop()
    assert s.attempt.stopped is None
    assert s.telemetry.registry.get_sample_value("hermes_requests_ended_total") is None
    assert s.silent


@each("finish, left, cut", [("stop", "", False), ("length", "", True), (None, "length", True)])
async def test_an_answer_that_met_its_max_tokens_is_cut_also_if_an_earlier_attempt_wrote_it(
    finish: str | None, left: str, cut: bool
) -> None:
    output = Output(0, "a", [1], left or None, None, None)
    s = Scene(Recorded(outputs=[output]) if left else None)
    await s.start()
    if finish:
        s.output("a", 1, finish)
    s.attempt.stop()
    _, terminal = s.ended()
    summary = terminal.summary
    assert summary is not None
    assert summary.cut is cut
