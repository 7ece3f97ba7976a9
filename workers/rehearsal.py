"""Attempts whose journal is a list: with these an engine shows before it serves that it could
continue another engine's answers.

What makes that possible are private interfaces of vLLM (`determinism`, `continuation`). Where a
version has changed one, an answer made again from its journal differs, or fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from serve_app.clock import RedisClock
from serve_app.contract import State
from serve_app.errors import SettingsError
from serve_app.journal.attempt import Attempt
from serve_app.journal.entries import Entry, decode_facts, decode_line
from serve_app.journal.facts import AttemptFacts, RequestFacts, RequestLine
from serve_app.journal.reader import JournalReader
from serve_app.observability.metrics import Telemetry
from workers import recorder as recording
from workers.engine import Engine
from workers.recorder import Recorder
from workers.replay import recorded

_ADMITTED = 1_700_000_000
_ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
        "logprobs": True,
    },
    "/v1/completions": {"prompt": "Hello", "max_tokens": 16},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
}


def first_entry(path: str, body: dict[str, Any], facts: RequestFacts) -> Entry:
    """Entry 0-1 of a request."""
    line = RequestLine("POST", path, "", [("content-type", "application/json")])
    return Entry.request(line, facts).with_body(msgspec.json.encode(body))


async def attempt(
    engine: Engine, journal: Sequence[Entry], request_id: str, telemetry: Telemetry
) -> tuple[list[Entry], Recorder]:
    """Work on a request as a worker does, one entry for every engine output, to the end of the
    response.

    Args:
        journal: what earlier attempts have left.

    Returns:
        The journal without its terminal entry, and what has recorded it.
    """
    epoch = journal[-1].id.epoch + 1
    opened = AttemptFacts("replica", engine.name, 1, fingerprint=engine.fingerprint)
    entries = [*journal, Entry.opening(epoch, b"nonce", opened)]

    def write(one: Attempt) -> None:
        while (entry := one.take()) is not None:
            one.accepted(entry)
            if not entry.terminal:
                entries.append(entry)

    one = Attempt(request_id, "", epoch, b"nonce", "", write)
    part = recorded(entries)
    if epoch > 1:
        one.continue_from(part.last, part.body, part.events, part.head)
    facts, line = decode_facts(entries[0], RequestFacts), decode_line(entries[0])
    recorder = Recorder(one, facts, opened, telemetry, RedisClock(), part)
    outer = recording.current.set(recorder)
    try:
        await engine.serve(request_id, line, entries[0].body, recorder)
    except Exception:
        if recorder.failure is None:
            raise
    finally:
        recording.current.reset(outer)
    if recorder.failure is not None:
        recorder.refuse(recorder.failure)
    else:
        recorder.end(State.FAILED if recorder.lost else State.COMPLETED, None, None)
    return entries, recorder


def body_of(entries: Sequence[Entry]) -> bytes:
    """The response bytes that a reader of a journal has."""
    reader, body = JournalReader(), []
    for entry in entries:
        reader.feed(entry)
        body.append(reader.take())
    return b"".join(body)


async def check_replay(engine: Engine, model: str, logprobs: bool) -> None:
    """Answer a short request of each kind that the model can serve; then make the answer again
    from its journal, which lacks only the last output. No byte may differ.

    Raises:
        SettingsError: something differs, or fails.
    """
    telemetry = Telemetry()  # of which nobody reads anything
    facts = RequestFacts("standard", "rehearsal", "", model, True, _ADMITTED * 1000, 2**62, "")
    for path, asked in _ASKED.items():
        fields = {**asked, "logprobs": logprobs} if "logprobs" in asked else asked
        body = {"model": model, "stream": True, "temperature": 0, "ignore_eos": True, **fields}
        journal = [first_entry(path, body, facts)]
        whole, first = await attempt(engine, journal, "req_rehearsal", telemetry)
        if first.failure and first.failure.status < 500:  # as of a model without a chat template
            continue
        _, second = await attempt(engine, whole[:-1], "req_rehearsal", telemetry)
        wrong = second.lost.why if second.lost else ""
        if first.failure:
            wrong = f"vLLM's server answers {first.failure.status}"
        elif second.failure:
            wrong = f"vLLM's server answers from the journal {second.failure.status}"
        elif b"%d" % _ADMITTED not in body_of(whole):
            wrong = "the response does not have the time of its request"
        if wrong:
            raise SettingsError(
                f"{engine.name} could not continue answers of {path}, because {wrong}: install the "
                "pinned version of vLLM"
            )
