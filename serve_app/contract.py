"""Everything that crosses a process: the words and values that ingresses and workers exchange.
Pure.

The words are stored and sent exactly as defined here, and different versions of the service work
side by side during an upgrade. Therefore rename a word only where readers of both versions
understand both (`Reason._missing_`), and let them tolerate words that they do not know.
`journal/entries.py` defines the entries of journals and wake-ups, `request_queue.py` a queue
entry.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import NamedTuple

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, INPUT_TOKENS, COMPACT = (
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/compact",
)
"""The paths whose bodies ask for a response, for the size of its input, or for its summary."""
OF_RESPONSES = (RESPONSES, INPUT_TOKENS, COMPACT)
ANTHROPIC = MESSAGE, MESSAGE_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
"""The same in Anthropic's protocol, which has errors of its own."""
COUNTING = (INPUT_TOKENS, MESSAGE_TOKENS, "/tokenize", "/detokenize")
"""What is read there is not computed."""

_ITEM = re.compile(r"[a-z]+_[0-9a-f]{16}([0-9a-f]{32})")


def item_name(value: str, request_id: str) -> str:
    """What follows `msg_`, `rs_` or `fc_` in the id of an item of a response: 16 hexadecimal digits
    of its own, and its request's id, so that the item is found without an index.
    """
    return value + request_id.removeprefix("req_")


def request_of_item(item_id: str) -> str | None:
    """The id of the request whose response has this item; None if no response of ours has it."""
    found = _ITEM.fullmatch(item_id)
    return f"req_{found[1]}" if found else None


def called(tool: object) -> tuple[str, str, str]:
    """What a request calls a tool by, in chats and in responses: its type, its name, and the server
    of a tool that has no name.
    """
    found = tool if isinstance(tool, dict) else {}
    inner = found.get("function")
    kind, named = ("function", inner) if isinstance(inner, dict) else ("", found)
    return (
        str(found.get("type", kind)),
        str(named.get("name", "")),
        str(found.get("server_label", "")),
    )


class State(StrEnum):
    """The state of a request. All but the first two are final."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @classmethod
    def _missing_(cls, value: object) -> State:
        """Only a newer version writes an unknown state, and only into an ending."""
        return cls.FAILED


FINAL = (State.COMPLETED, State.FAILED, State.CANCELLED, State.EXPIRED)
"""Rows of the ledger count requests by them, in this order."""


class Reason(StrEnum):
    """Why a request was refused or ended without an answer: a closed, low-cardinality set.
    `reasons.toml` says what follows from each.
    """

    INVALID_API_KEY = "invalid_api_key"
    KEY_NOT_PERMITTED = "key_not_permitted"
    MALFORMED_JSON = "malformed_json"
    INVALID_REQUEST = "invalid_request"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BODY_TOO_LARGE = "body_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    UPLOAD_TIMEOUT = "upload_timeout"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    QUEUE_FULL = "queue_full"
    STORAGE_FULL = "storage_full"
    RESULTS_FULL = "results_full"
    TENANT_LIMIT = "tenant_limit"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    """OpenAI's word for too many requests or tokens a minute."""
    CONCURRENCY_LIMIT = "concurrency_limit"
    QUOTA_EXCEEDED = "quota_exceeded"
    OVERLOADED = "overloaded"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    """OpenAI's word for what is longer than the model's context."""
    PREVIOUS_RESPONSE_NOT_FOUND = "previous_response_not_found"
    """OpenAI's word."""
    TOO_MANY_CONNECTIONS = "too_many_connections"
    JOURNAL_UNAVAILABLE = "journal_unavailable"
    JOURNAL_LOST = "journal_lost"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    NOT_CONFIGURED = "not_configured"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    CLIENT_DISCONNECTED = "client_disconnected"
    WITHDRAWN = "withdrawn"
    """A line of a batch whose window of the day has closed before a worker began it."""
    ENGINE_ERROR = "engine_error"
    ATTEMPT_LOST = "attempt_lost"
    POISON = "poison"
    EVENT_LOOP_BLOCKED = "event_loop_blocked"
    ANSWER_TOO_LARGE = "answer_too_large"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    INTERNAL = "internal"

    @classmethod
    def _missing_(cls, value: object) -> Reason:
        """The word of a newer version."""
        return cls.INTERNAL


class NotResumed(StrEnum):
    """Why no engine could resume an answer that a client has begun to read: the label `cause` of
    `hermes_requests_not_resumed_total`.
    """

    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    """One of the request's parameters has a state that another engine cannot restore."""
    ENGINE_CONFIG_CHANGED = "engine_config_changed"
    """Only engines of another model, version or configuration are left."""
    JOURNAL_INCOMPLETE = "journal_incomplete"
    """Redis has lost a part of the journal."""
    OUTPUT_MISMATCH = "output_mismatch"
    """The answer was generated again and differs from what the client has."""
    REGENERATION_LIMIT = "regeneration_limit"
    """More than `workers.max_regenerated_tokens` would have to be generated again."""


class Cause(StrEnum):
    """Why an attempt ended before its request did."""

    NOT_OPENED = "not_opened"
    """No worker opened the attempt in time after the call was sent, or Redis could not be reached
    meanwhile: no request is to blame.
    """
    LOST = "lost"
    """The engine or the worker died."""
    HUNG = "hung"
    """The worker's lease expired while Redis was there to renew it: the request may be the cause.
    """
    REDIS_UNREACHABLE = "redis_unreachable"
    """The worker's lease expired, perhaps only because Redis could not be reached, or Redis has
    perhaps lost the end of an attempt: no request is to blame.
    """
    DRAINED = "drained"
    """The replica left Ray Serve's set of running replicas."""
    ENGINE_FAILED = "engine_failed"
    """The worker gave the attempt up because its engine is sick."""


class CallResult(StrEnum):
    """How an attempt of a worker ended."""

    ENDED = "ended"
    """The request has ended."""
    FENCED = "fenced"
    """Another attempt owns the journal, or the journal is gone."""


class CompletionStats(NamedTuple):
    """What a request has written by its end."""

    tokens: int
    whole: bool = True
    """Whether the answer ended by itself. The length of one that was broken off says nothing about
    other requests.
    """
    begun: bool = True
    """Whether a worker has worked on it. A request that was cancelled while it waited has used
    nothing.
    """
    prompt_tokens: int = 0
    """What it has read, as the engine counted; 0 if that is not known."""


class AttemptResult(NamedTuple):
    """A worker's answer to `execute`."""

    outcome: CallResult
    written: CompletionStats | None = None
    """What the request has written; None if the worker does not know."""
    acknowledged: str = ""
    """The id of the queue entry that its end has removed; empty where that is left to the ingress.
    Only beside what was written.
    """

    def encode(self) -> str:
        """The answer as it crosses the process: `<outcome>`, or
        `<outcome>|<tokens>|<1 or 0: whole>|<1 or 0: begun>|<prompt tokens>|<acknowledged>`.
        """
        if self.written is None:
            return self.outcome.value
        return "|".join(
            [self.outcome, *(f"{value:d}" for value in self.written), self.acknowledged]
        )

    @classmethod
    def decode(cls, text: str) -> AttemptResult:
        """Parse an answer; raises ValueError if its word is unknown or it lacks a number."""
        word, *more = str(text).split("|")
        if not more:
            return cls(CallResult(word))
        tokens, whole, begun, prompt_tokens = map(int, more[:4])
        written = CompletionStats(tokens, bool(whole), bool(begun), prompt_tokens)
        return cls(CallResult(word), written, more[4])


Execute = Callable[[str, int, str, str], Awaitable[AttemptResult]]
"""`execute(request_id, epoch, replica, cause)`, with positional arguments. `cause` says why the
previous attempt ended, and is empty for the first. Raises `WorkerLost` if the outcome is unknown.
"""


class WorkerLost(Exception):
    """A call brought no answer, because the replica died or became unreachable (`LOST`), or could
    not reach Redis when it opened the attempt (`NOT_OPENED`).
    """

    def __init__(self, message: str = "", cause: Cause = Cause.LOST) -> None:
        super().__init__(message)
        self.cause = cause


class IngressLease(NamedTuple):
    """The lease of an ingress, a member of `{ns}:ingresses` (`decode` of each member below raises
    ValueError for another text):
    `<name>|<Ray cluster>|<1 or 0>|<running>|<waiting>||<general>|<unclaimed>|<model>|<since>`,
    and perhaps `|load=<load>`. What is empty has no meaning any more. In the model's name a `:`,
    which no model's name has, stands for `|`.
    """

    name: str
    cluster: str = ""
    complete: bool = False
    """Whether the ingress sees every replica that its Ray cluster is meant to have."""
    running: int = 0
    """Slots that it uses, or will use at once."""
    waiting: int = 0
    """Slots for the requests that it has claimed and not started."""
    running_general: int = 0
    """How many of the slots are used by requests that have no right to a spare one."""
    unclaimed: int = 0
    """Requests in the queue that it cannot claim now; all ingresses count the same ones."""
    model: str = ""
    """Whose queues it claims from."""
    since_ms: int = 0
    """When its Ray cluster entered the namespace: Unix milliseconds by Redis's clock."""
    load: str = ""
    """What waits and starts there (`policy/overload.py`); empty from an older version."""

    def encode(self) -> str:
        words = (int(self.complete), self.running, self.waiting, "", self.running_general)
        later = (self.unclaimed, self.model.replace("|", ":"), self.since_ms)
        load = (f"load={self.load}",) if self.load else ()
        return "|".join(map(str, (self.name, self.cluster, *words, *later, *load)))

    @classmethod
    def decode(cls, member: bytes) -> IngressLease:
        name, cluster, *all_words = member.decode().split("|")
        (*words, model, since), later = all_words[:8], all_words[8:]
        complete, running, waiting, _, general, unclaimed = (int(word or 0) for word in words)
        use = (bool(complete), running, waiting, general, unclaimed)
        load = [word.removeprefix("load=") for word in later if word.startswith("load=")]
        return cls(name, cluster, *use, model.replace(":", "|"), int(since), "".join(load[:1]))


class WorkerLease(NamedTuple):
    """The lease of a worker, a member of `{ns}:workers`: `<name>|<capacity>`."""

    name: str
    capacity: int
    """How many sequences its engine may run now (`workers/replica.py`)."""

    def encode(self) -> str:
        return f"{self.name}|{self.capacity}"

    @classmethod
    def decode(cls, member: bytes) -> WorkerLease:
        name, _, capacity = member.decode().rpartition("|")
        return cls(name, int(capacity))


class WorkerAddress(NamedTuple):
    """Where a worker takes calls, a member of `{ns}:calls`: `<key>|<port>|<host>|<name>`."""

    name: str
    """Of its lease."""
    host: str
    port: int
    key: str
    """Hexadecimal; whoever connects proves that it knows it. It must be in no log."""

    def __repr__(self) -> str:
        return f"WorkerAddress({self.name!r}, {self.host!r}, {self.port})"

    def encode(self) -> str:
        return f"{self.key}|{self.port}|{self.host}|{self.name}"

    @classmethod
    def decode(cls, member: bytes) -> WorkerAddress:
        key, port, host, name = member.decode().split("|", 3)
        return cls(name, host, int(port), bytes.fromhex(key).hex())


class EngineReport(NamedTuple):
    """What an engine has and uses, as it says itself; a member of `{ns}:engines`:
    `<name>|<KV tokens>|<longest>|<used>|<running>|<waiting>|<preemptions>|<model>`, the model's
    name as in a lease.
    """

    name: str
    """Of its worker's lease."""
    kv_tokens: int
    """Tokens whose keys and values fit into its cache."""
    max_model_len: int
    """Tokens of a prompt and its answer together."""
    used_tokens: int = 0
    """What running sequences occupy of the cache."""
    running: int = 0
    """Sequences in its batch."""
    waiting: int = 0
    """Sequences that it has taken and that want a place in its batch, also preempted ones."""
    preemptions: int = 0
    """How often it had to forget what a sequence had computed, since it was started."""
    model: str = ""
    """What it serves; empty in a report of an older version."""

    def encode(self) -> str:
        return "|".join(map(str, (*self[:-1], self.model.replace("|", ":"))))

    @classmethod
    def decode(cls, member: bytes) -> EngineReport:
        name, *parts = member.decode().split("|")
        if len(parts) < 6:
            raise ValueError(f"a report with {len(parts)} numbers")
        model = parts[6].replace(":", "|") if len(parts) > 6 else ""
        return cls._make((name, *map(int, parts[:6]), model))
