"""The contents of Redis while a request runs and afterwards (docs/architecture.md, the journal)."""

from __future__ import annotations

import json

from tests.service.support import LONG_TOKENS, Running, Stream
from tests.waiting import until


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
