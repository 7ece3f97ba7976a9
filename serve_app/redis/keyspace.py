"""Every key and channel of the service in Redis: its name, type, writers and lifetime. Pure.

No other module composes a name. All names begin with the namespace, which is all that the service's
Redis user may access (`cluster/redis.acl`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple


def journal_key(namespace: str, request_id: str) -> str:
    """The journal of a request: the only authoritative record of it."""
    return f"{namespace}:j:{request_id}"


def body_key(namespace: str, request_id: str) -> str:
    """The body of a request, apart from its journal, so that reading a state does not read the
    body.
    """
    return f"{namespace}:b:{request_id}"


QUEUE_GROUP = "ingress"
"""The consumer group of every queue; a consumer is an ingress process."""


def queue_key(namespace: str, model: str, request_class: str) -> str:
    """The requests of one class that wait or are being worked on; consumer group `ingress`."""
    return f"{namespace}:q:{model}:{request_class}"


def dead_letters_key(namespace: str) -> str:
    """Requests that were given up, and entries that could not be decoded."""
    return f"{namespace}:dead"


def later_request_key(namespace: str, first_id: str) -> str:
    """The id of the newest request of an `Idempotency-Key`, if that is not the first one."""
    return f"{namespace}:i:{first_id}"


def requests_key(namespace: str, tenant: str) -> str:
    """The ids of a tenant's latest requests, by their admission in Unix milliseconds."""
    return f"{namespace}:r:{tenant}"


def chats_key(namespace: str, tenant: str) -> str:
    """The ids of a tenant's latest stored chat completions, by their admission in Unix
    milliseconds.
    """
    return f"{namespace}:c:{tenant}"


def metadata_key(namespace: str, request_id: str) -> str:
    """The metadata of a stored chat completion, if they were changed."""
    return f"{namespace}:m:{request_id}"


def kept_key(namespace: str, tenant: str) -> str:
    """Bytes of a tenant's (without a name: of all) answers that are kept for later, by the
    hour in which they expire.
    """
    return f"{namespace}:k:{tenant}"


def usage_key(namespace: str, hour: int) -> str:
    """What the requests have used that ended in an hour (since 1970): the ledger, by tenant, API
    key, class and model.
    """
    return f"{namespace}:u:{hour}"


def readers_key(namespace: str, request_id: str) -> str:
    """The ingresses that hold a connection of a request's client, as long as they live."""
    return f"{namespace}:a:{request_id}"


def wake_channel(namespace: str, ingress_id: str) -> str:
    """Wake-ups for an ingress: the new entries of the journals that it follows."""
    return f"{namespace}:w:{ingress_id}"


def ingresses_key(namespace: str) -> str:
    """The living ingresses, by the end of their leases."""
    return f"{namespace}:ingresses"


def workers_key(namespace: str) -> str:
    """The living workers and their capacity, by the end of their leases."""
    return f"{namespace}:workers"


def engines_key(namespace: str) -> str:
    """What the living workers' engines have and use, by the end of their leases."""
    return f"{namespace}:engines"


def suspect_key(namespace: str) -> str:
    """A lock under which requests that have killed engines run one at a time."""
    return f"{namespace}:suspect"


def metrics_key(namespace: str, replica: str) -> str:
    """The metrics page of a process, compressed, for the ingress that answers `/metrics`."""
    return f"{namespace}:metrics:{replica}"


def trial_key(namespace: str, process: str, part: str) -> str:
    """What a process writes to try whether Redis can be used (`redis/trial.py`)."""
    return f"{namespace}:try:{process}:{part}"


def trial_channel(namespace: str, process: str) -> str:
    """The same for a message."""
    return f"{namespace}:try:{process}"


class Type(StrEnum):
    """The type of a key in Redis, or a channel."""

    STREAM = "stream"
    STRING = "string"
    SORTED_SET = "sorted set"
    HASH = "hash"
    ANY = "stream, string, sorted set or hash"
    CHANNEL = "channel"


class Kind(NamedTuple):
    """One kind of key or channel. The docstring of `name` says what it holds."""

    name: Callable[..., str]
    type: Type
    writers: str
    lifetime: str

    @property
    def pattern(self) -> str:
        """The name with its parts in angle brackets: `<namespace>:j:<request_id>`."""
        return self.name(*(f"<{part}>" for part in inspect.signature(self.name).parameters))

    @property
    def holds(self) -> str:
        """What it holds, in one sentence."""
        return inspect.getdoc(self.name) or ""


_RETENTION = "until its deadline, then `journal.retention_s` after its end"

KINDS = (
    Kind(journal_key, Type.STREAM, "ingress (admission, endings), worker (output)", _RETENTION),
    Kind(
        body_key,
        Type.STRING,
        "ingress (admission)",
        "until the request ends, or as long as the journal if it is stored",
    ),
    Kind(
        queue_key,
        Type.STREAM,
        "ingress (admission, dispatcher)",
        "forever; an entry until its request ends",
    ),
    Kind(
        dead_letters_key,
        Type.STREAM,
        "ingress (dispatcher), `scripts/dead-letters`",
        "forever; the last `queue.dead_letters` entries",
    ),
    Kind(
        later_request_key,
        Type.STRING,
        "ingress (admission)",
        "a minute longer than its request's journal",
    ),
    Kind(
        requests_key,
        Type.SORTED_SET,
        "ingress (admission)",
        "the longest that a journal of the newest one can be kept; the last "
        "`journal.listed_requests` ids",
    ),
    Kind(
        chats_key,
        Type.SORTED_SET,
        "ingress (admission)",
        "as the ids of the latest requests",
    ),
    Kind(metadata_key, Type.STRING, "ingress", "as its request's journal"),
    Kind(
        kept_key,
        Type.HASH,
        "worker, ingress (endings)",
        "two hours longer than `journal.max_retention_s` after the last such answer",
    ),
    Kind(usage_key, Type.HASH, "worker, ingress (endings)", "`journal.ledger_days`"),
    Kind(readers_key, Type.SORTED_SET, "ingress", "two minutes"),
    Kind(wake_channel, Type.CHANNEL, "worker, ingress (endings)", "while the ingress is alive"),
    Kind(ingresses_key, Type.SORTED_SET, "ingress", "forever; a member for its lease"),
    Kind(
        workers_key,
        Type.SORTED_SET,
        "worker; all processes remove expired members",
        "forever; a member for its lease",
    ),
    Kind(engines_key, Type.SORTED_SET, "worker", "forever; a member for its worker's lease"),
    Kind(suspect_key, Type.STRING, "ingress (dispatcher)", "a lease"),
    Kind(
        metrics_key, Type.STRING, "each process", "4 × `telemetry.snapshot_period_s`, at least 5 s"
    ),
    Kind(trial_key, Type.ANY, "ingress, `hermes check-redis`", "milliseconds; at most a minute"),
    Kind(trial_channel, Type.CHANNEL, "ingress, `hermes check-redis`", "while it is tried"),
)
