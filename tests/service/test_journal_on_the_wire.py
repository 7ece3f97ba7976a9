"""The contents of Redis while a request runs and afterwards (docs/architecture.md, the journal)."""

from __future__ import annotations

import json
import zlib

import pytest
from redis import ResponseError

from serve_app.policy.classes import CLASSES
from tests.service.support import LONG_TOKENS, STORY, Running, Stream
from tests.waiting import until

TERMINAL = b"18446744073709551615-18446744073709551615"
STALE = "equal or smaller"


@pytest.mark.nightly  # in the gate: journal/test_writer.py
def test_a_finished_request_is_its_terminal_entry_with_the_whole_transcript(
    service: Running,
) -> None:
    with service.stream(tokens=30) as response:
        stream = Stream(response)
        whole = stream.rest()
    key = service.journal_key(stream.request_id)
    until("the journal is compacted", lambda: service.redis.xlen(key) == 1)
    ((entry_id, fields),) = service.entries(key)
    assert entry_id == TERMINAL
    assert fields[b"k"] == b"completed"
    assert fields[b"w"] == b""
    assert int(fields[b"e"]) == len(whole)
    assert zlib.decompress(fields[b"z"]).decode() == stream.text
    assert len(fields[b"n"]) == 8
    summary = json.loads(fields[b"m"])
    assert summary["attempts"] == 1
    assert summary["output_tokens"] == 30
    assert until("it expires", lambda: service.redis.pttl(key) > 0)
    assert service.redis.pttl(key) <= 900_000


def test_a_running_request_has_its_request_its_opening_and_its_outputs_in_order(
    service: Running,
) -> None:
    with service.long_stream() as response:
        stream = Stream(response)
        stream.next_events(20)
        key = service.journal_key(stream.request_id)
        entries = service.entries(key)
        body_key = f"hermes:b:{stream.request_id}"
        body = service.redis.get(body_key) or b""
        assert min(service.redis.pttl(key), service.redis.pttl(body_key)) > 0, (
            "written together with its expiry"
        )
        service.cancel(stream.request_id)
        stream.rest()
    ids = [entry_id for entry_id, _ in entries]
    assert ids == [b"0-1", *(b"1-%d" % seq for seq in range(len(ids) - 1))]
    request, opening = entries[0][1], entries[1][1]
    assert json.loads(request[b"r"])["path"] == "/v1/chat/completions"
    assert json.loads(body)["max_tokens"] == LONG_TOKENS
    assert b"b" not in request
    until("its body is gone", lambda: not service.redis.exists(body_key))
    assert b"n" not in request
    nonce = opening[b"n"]
    assert json.loads(opening[b"m"])["replica"] == response.headers["x-hermes-replica"]
    outputs = [fields for _, fields in entries[2:]]
    assert len(outputs) > 1
    assert {fields[b"n"] for fields in outputs} == {nonce}
    token_ids = [ids for fields in outputs for _, _, ids, *_ in json.loads(fields.get(b"o", b"[]"))]
    assert all(token_ids)
    journalled = b"".join(fields.get(b"b", b"") for fields in outputs).decode()
    assert stream.text.startswith(journalled)
    assert [int(fields[b"e"]) for fields in outputs] == sorted(
        int(fields[b"e"]) for fields in outputs
    )


def test_no_credential_of_the_client_stands_in_the_journal(service: Running) -> None:
    secret = "sk-should-never-be-stored"
    headers = {
        "authorization": f"Bearer {secret}",
        "cookie": f"session={secret}",
        "x-api-key": secret,
    }
    with service.long_stream(headers=headers) as response:
        stream = Stream(response)
        stream.next_events(5)
        entries = service.entries(service.journal_key(stream.request_id))
        service.cancel(stream.request_id)
    assert len(entries) > 2
    assert secret not in repr(entries)


@pytest.mark.nightly  # in the gate: journal/test_fencing.py
def test_an_append_with_a_stale_epoch_is_refused_and_its_writer_stops(service: Running) -> None:
    service.until_idle()
    undisturbed = service.text(STORY, 2000)
    with service.stream(tokens=2000) as response:
        stream = Stream(response)
        begun = stream.next_events(5)
        key = service.journal_key(stream.request_id)
        service.redis.xadd(key, {"n": "another1", "m": json.dumps(_opening())}, id="2-0")
        with pytest.raises(ResponseError, match=STALE):
            service.redis.xadd(key, {"n": "late"}, id="1-18446744073709551615")
        # The second attempt's worker never was: once that is certain, a third goes on where the
        # first stopped.
        found = begun + stream.rest()
    assert service.state(stream.request_id)["attempts"] == 3
    assert [event.id for event in found] == list(range(1, len(found) + 1))
    assert found[-1].data == "[DONE]"
    deltas = [json.loads(event.data)["choices"][0]["delta"] for event in found[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == undisturbed
    service.until_idle()


@pytest.mark.nightly  # in the gate: journal/test_writer.py
def test_nothing_can_follow_the_terminal_entry(service: Running) -> None:
    key = service.journal_key(service.ask(tokens=4).headers["x-request-id"])
    until("the terminal entry", lambda: service.entries(key)[-1][0] == TERMINAL)
    with pytest.raises(ResponseError):
        service.redis.xadd(key, {"n": "late"}, id="2-0")
    with pytest.raises(ResponseError):
        service.redis.xadd(key, {"n": "late"}, id="*")


@pytest.mark.nightly  # in the gate: journal/test_queue_and_members.py
def test_the_queue_forgets_a_request_that_has_ended(service: Running) -> None:
    service.ask(tokens=4)
    service.until_idle()
    streams = [key.decode() for key in service.redis.scan_iter(match="hermes:q:*")]
    assert {name.rpartition(":")[2] for name in streams} == set(CLASSES)
    until("every line is empty", lambda: sum(service.redis.xlen(name) for name in streams) == 0)


def _opening() -> dict[str, object]:
    return {"replica": "elsewhere", "engine": "vllm-0", "opened_ms": 0, "resumed_from": "0-1"}
