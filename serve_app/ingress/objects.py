"""What is stored, as the objects of the API: requests, responses, chat completions and their items,
lists in pages, and the errors that name one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from serve_app.contract import Reason, State
from serve_app.errors import RequestRefused, error_body, invalid_value
from serve_app.journal.entries import Entry, RequestFacts
from serve_app.journal.events import SEPARATOR
from serve_app.journal.reader import JournalReader, read_whole
from serve_app.journal.usage import Usage
from serve_app.requests.record import Record

RESPONSE = "resp_"
CHAT = "chatcmpl-"
"""Behind it, the id of a chat completion, or of a response, is its request's."""
Fields = dict[str, msgspec.Raw]
"""What an object has in its fields may be large, and is passed on as it is."""

fields_of = msgspec.json.Decoder(Fields).decode
_input = msgspec.json.Decoder(str | list[msgspec.Raw])

# -- errors and lists -----------------------------------------------------------------------------


def not_found(
    what: str, name: str, param: str = "id", reason: Reason = Reason.NOT_FOUND
) -> RequestRefused:
    return RequestRefused(reason, f"{what} with id '{name[:80]}' not found.", param=param)


def listing(
    data: Sequence[Any], first_id: str | None, last_id: str | None, more: bool
) -> dict[str, Any]:
    ids = {"first_id": first_id, "last_id": last_id}
    return {"object": "list", "data": data, **ids, "has_more": more}


def page(items: Sequence[tuple[str, Any]], order: str, after: str, limit: int) -> dict[str, Any]:
    """A page of items with their ids; `order`: `asc`, as they are given, or `desc`."""
    if order == "desc":
        items = items[::-1]
    ids = [name for name, _ in items]
    if after and after not in ids:
        raise invalid_value("after", f"there is no item '{after[:80]}'")
    begin = ids.index(after) + 1 if after else 0
    shown = items[begin : begin + limit]
    first, last = (shown[0][0], shown[-1][0]) if shown else (None, None)
    return listing([item for _, item in shown], first, last, begin + limit < len(ids))


async def wanted_page(
    ids: Sequence[str], looks: AsyncIterator[dict[str, Any] | None], limit: int
) -> tuple[list[dict[str, Any]], str | None, bool]:
    """Up to `limit` objects that a search finds, which looks at one id after the other and may end
    early; the id that it has looked at last; and whether there are more ids.
    """
    data: list[dict[str, Any]] = []
    looked_at = 0
    async for found in looks:
        looked_at += 1
        if found is not None:
            data.append(found)
            if len(data) == limit:
                break
    return data, ids[looked_at - 1] if looked_at else None, looked_at < len(ids)


# -- requests -------------------------------------------------------------------------------------


def request_object(request_id: str, record: Record) -> dict[str, Any]:
    """A request. Times are Unix milliseconds; unknown values are null."""
    facts, attempt, summary = record.facts, record.attempt, record.summary
    return {
        "id": request_id,
        "object": "request",
        "state": record.state,
        "reason": record.last.reason,
        "class": facts.request_class if facts else None,
        "model": facts.called if facts else None,
        "client_request_id": (facts.client_request_id or None) if facts else None,
        "replica": attempt.replica if attempt else None,
        "engine": attempt.engine if attempt else None,
        "attempts": record.attempts,
        "events": record.events,
        "usage": _usage(record.used) if record.used is not None else None,
        "admitted_at_ms": facts.admitted_ms if facts else None,
        "started_at_ms": attempt.opened_ms if attempt else None,
        "first_output_at_ms": summary.first_output_ms if summary else None,
        "ended_at_ms": summary.ended_ms if summary else None,
        "deadline_at_ms": facts.deadline_ms if facts else None,
    }


def _usage(used: Usage) -> dict[str, int]:
    return {f"{name}_tokens": count for name, count in used._asdict().items()}


# -- responses, which repeat in every state what their clients have asked --------------------------

_ECHOED = fields_of(b"""{
    "instructions": null, "max_output_tokens": null, "max_tool_calls": null, "metadata": {},
    "parallel_tool_calls": true, "previous_response_id": null, "prompt": null,
    "prompt_cache_key": null, "reasoning": null, "safety_identifier": null,
    "service_tier": "auto", "text": {"format":{"type":"text"}}, "tool_choice": "auto", "tools": [],
    "top_logprobs": 0, "truncation": "disabled", "user": null
}""")
"""What a response repeats of its request, and OpenAI's defaults."""
_CHOSEN_BY_ENGINE = fields_of(
    b'{"frequency_penalty": 0.0, "presence_penalty": 0.0, "temperature": 1.0, "top_p": 1.0}'
)
"""The same of fields for which a model may have defaults of its own: its answer says them."""


def response_object(request_id: str, entries: Sequence[Entry], asked: bytes | None) -> bytes:
    """A response, from its journal, or from the record of one that has not ended.

    Args:
        asked: the body of its request; None if it is not kept (any more).
    """
    reader, fields = response_in(entries)
    facts, ending = reader.facts, reader.ending
    assert facts is not None, "it has a tenant"
    if ending is None:
        state = State.RUNNING if reader.attempt else State.QUEUED
        return unanswered_response(request_id, facts, asked, state)
    if ending.state is not State.COMPLETED:
        error = error_body(ending.reason or Reason.INTERNAL, ending.message)["error"]
        return unanswered_response(request_id, facts, asked, ending.state, error)
    if fields is None:  # it is the journal of another endpoint
        raise not_found("Response", RESPONSE + request_id)
    if asked is not None:
        chosen = {name: fields.get(name, default) for name, default in _CHOSEN_BY_ENGINE.items()}
        fields = fields | _echo(fields_of(asked), chosen | _ECHOED)
    return msgspec.json.encode({**fields, "background": facts.detached, "store": facts.stored})


def unanswered_response(
    request_id: str,
    facts: RequestFacts,
    asked: bytes | None,
    state: State,
    error: Mapping[str, Any] | None = None,
) -> bytes:
    """The same without an answer; `error`: why, if it has failed."""
    status = state if state in (State.QUEUED, State.CANCELLED) else State.FAILED
    failed = error if status is State.FAILED else None
    made: dict[str, Any] = {
        **_echo(fields_of(asked) if asked is not None else {}, _ECHOED | _CHOSEN_BY_ENGINE),
        "id": f"{RESPONSE}{request_id}",
        "object": "response",
        "created_at": facts.admitted_ms // 1000,
        "status": "in_progress" if state is State.RUNNING else status,
        "background": facts.detached,
        "store": facts.stored,
        "model": facts.called,
        "error": failed and {"code": failed["code"], "message": failed["message"]},
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    return msgspec.json.encode(made)


def _echo(given: Fields, defaults: Fields) -> Fields:
    """What a response repeats of the fields that its client gave, as they were given."""
    return {
        name: default if bytes(given.get(name, b"null")) == b"null" else given[name]
        for name, default in defaults.items()
    }


def response_in(entries: Sequence[Entry]) -> tuple[JournalReader, Fields | None]:
    """What a reader of a whole journal knows, and the response that the engine's server has
    written; None if there is none, or it is the journal of another endpoint.
    """
    reader, body = read_whole(entries)
    try:
        if reader.streams:  # its last event holds it
            event = body.rstrip().rpartition(SEPARATOR)[2]
            body = fields_of(event.partition(b"data: ")[2])["response"]
        fields = fields_of(body)
    except (msgspec.MsgspecError, LookupError):
        fields = {}
    return reader, fields if bytes(fields.get("object", b"")) == b'"response"' else None


def input_items(asked: bytes) -> list[msgspec.Raw]:
    """The items of a request's input; a text is a message."""
    given = _input.decode(fields_of(asked)["input"])
    if isinstance(given, list):
        return given
    content = [{"type": "input_text", "text": given}]
    item = {"type": "message", "role": "user", "content": content}
    return [msgspec.Raw(msgspec.json.encode(item))]


def named_input_items(request_id: str, asked: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The same with their ids; an item without one is named by its place."""
    try:
        items = input_items(asked)
    except LookupError:  # it is the body of another endpoint
        raise not_found("Response", RESPONSE + request_id) from None
    named = []
    for number, item in enumerate(items):
        fields = fields_of(item)
        given = msgspec.json.decode(fields.get("id", b"null"))
        name = str(given or f"item_{request_id}_{number}")
        named.append((name, {"type": msgspec.Raw(b'"message"'), **fields, "id": name}))
    return named


# -- chat completions -----------------------------------------------------------------------------


def chat_object(entries: Sequence[Entry]) -> tuple[dict[str, Any] | None, int]:
    """The chat completion in a journal, None if it has none; and its size in bytes."""
    reader, answer = read_whole(entries)
    if reader.ending is None or reader.ending.state is not State.COMPLETED:
        return None, len(answer)
    if not reader.streams:
        return msgspec.json.decode(answer), len(answer)
    usage = None
    if entries[-1].used:  # what a stream says only if it was asked to
        used = Usage.decode(entries[-1].used)
        usage = {"prompt_tokens": used.prompt, "completion_tokens": used.output}
        usage["total_tokens"] = used.prompt + used.output
    return {"usage": usage, **merged(answer)}, len(answer)


def merged(events: bytes) -> dict[str, Any]:
    """The chat completion that the chunks of a stream make."""
    whole: dict[str, Any] = {}
    choices: dict[int, _Choice] = {}
    for event in events.split(SEPARATOR):
        data = event.partition(b"data: ")[2]
        if not data or data.startswith(b"[DONE]"):
            continue
        chunk = msgspec.json.decode(data)
        for part in chunk.pop("choices", ()):
            choices.setdefault(part.get("index", 0), _Choice()).add(part)
        whole.update({name: value for name, value in chunk.items() if value is not None})
    joined = [choice.joined(index) for index, choice in sorted(choices.items())]
    return {**whole, "object": "chat.completion", "choices": joined}


class _Choice:
    """One answer of a stream, in pieces: each is joined once, however many there are."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {"role": "assistant", "refusal": None}
        self._texts: dict[str, list[str]] = {"content": []}
        self._calls: dict[int, dict[str, list[str]]] = {}
        self._finish_reason: str | None = None
        self._logprobs: list[Any] = []

    def add(self, part: Mapping[str, Any]) -> None:
        for name, value in part.get("delta", {}).items():
            if name == "tool_calls":
                for call in value or ():
                    its = self._calls.setdefault(call.get("index", 0), {})
                    for key, piece in (
                        {"id": call.get("id")} | (call.get("function") or {})
                    ).items():
                        its.setdefault(key, []).append(piece or "")
            elif isinstance(value, str) and name != "role":
                self._texts.setdefault(name, []).append(value)
            elif value is not None:
                self._message[name] = value
        self._finish_reason = part.get("finish_reason") or self._finish_reason
        self._logprobs += (part.get("logprobs") or {}).get("content") or ()

    def joined(self, index: int) -> dict[str, Any]:
        texts = {name: "".join(pieces) if pieces else None for name, pieces in self._texts.items()}
        message = {**self._message, **texts}
        if self._calls:
            message["tool_calls"] = [_call(its) for _, its in sorted(self._calls.items())]
        return {
            "index": index,
            "message": message,
            "finish_reason": self._finish_reason,
            "logprobs": {"content": self._logprobs} if self._logprobs else None,
        }


def _call(pieces: Mapping[str, list[str]]) -> dict[str, Any]:
    said = {name: "".join(pieces.get(name, ())) for name in ("name", "arguments")}
    call_id = next(filter(None, reversed(pieces.get("id", []))), None)
    return {"id": call_id, "type": "function", "function": said}
