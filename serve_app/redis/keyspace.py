"""The name of every key and channel of the service in Redis. Pure. docs/redis-keys.md has their
types, writers and lifetimes.

No other module composes a name. All names begin with the namespace, which is all that the service's
Redis user may access (`cluster/redis.acl`).
"""

from __future__ import annotations

from collections.abc import Callable


def _one(form: str) -> Callable[[str], str]:
    """A name of which each namespace has one."""
    return lambda namespace: f"{namespace}:{form}"


def _each(form: str) -> Callable[[str, str | int], str]:
    """A name of which there is one for each of what the form ends with."""
    kind = form.partition("<")[0]
    return lambda namespace, of: f"{namespace}:{kind}{of}"


journal_key = _each("j:<request_id>")
"""The journal of a request: the only authoritative record of it."""
body_key = _each("b:<request_id>")
"""The body of a request, apart from its journal, which many read."""

QUEUE_GROUP = "ingress"
"""The consumer group of every queue; a consumer is an ingress process."""


def queue_key(namespace: str, model: str, request_class: str) -> str:
    """The requests of one class that wait or are being worked on; consumer group `ingress`."""
    return f"{namespace}:q:{model}:{request_class}"


due_key = _one("due")
"""The ids of the requests that have not ended, by their deadlines in Unix milliseconds."""
dead_letters_key = _one("dead")
"""Requests that were given up, and entries that could not be decoded."""
later_request_key = _each("i:<first_id>")
"""The id of the newest request of an `Idempotency-Key`, if that is not the first one."""
requests_key = _each("r:<tenant>")
"""The ids of a tenant's latest requests, by their admission in Unix milliseconds."""
chats_key = _each("c:<tenant>")
"""The ids of a tenant's latest stored chat completions, by their admission."""
metadata_key = _each("m:<request_id>")
"""The metadata of a stored chat completion, if they were changed."""
kept_key = _each("k:<tenant>")
"""Bytes of a tenant's (without a name: of all) answers, by the hour in which they expire."""
usage_key = _each("u:<hour>")
"""The ledger of an hour (since 1970): what the requests have used that ended in it."""
readers_key = _each("a:<request_id>")
"""The ingresses that hold a connection of a request's client, as long as they live."""
twins_key = _each("t:<digest>")
"""Equal requests without an `Idempotency-Key`, which a retry may join, and whose ingress reads
them.
"""
limits_key = _each("limits:<tenant>")
"""What a tenant has used of its limits (`requests/lifecycle.lua`)."""
running_key = _each("running:<tenant>")
"""A limited tenant's requests that have not ended, by when they have for certain."""
wake_channel = _each("w:<ingress_id>")
"""Wake-ups for an ingress: the new entries of the journals that it follows."""

service_key = _one("service")
"""The name of the service to which the namespace belongs, as long as it has an ingress."""
cluster_key = _each("cluster:<cluster>")
"""When a Ray cluster entered the namespace, in Unix milliseconds."""
models_key = _one("models")
"""The models whose requests and batches may wait, by when an ingress served them last."""
ingresses_key = _one("ingresses")
"""The living ingresses, by the end of their leases."""
workers_key = _one("workers")
"""The living workers and their capacity, by the end of their leases."""
engines_key = _one("engines")
"""What the living workers' engines have and use, by the end of their leases."""
calls_key = _one("calls")
"""Where the living workers take calls, by the end of their leases."""

batch_key = _each("batch:<batch_id>")
"""A batch: its facts, its state, its counts and what it has used (`batches/batches.lua`)."""
batch_lines_key = _each("batch_lines:<batch_id>")
"""The lines of a batch that are taken and have no result in a segment, and the try of each."""
batch_segments_key = _each("batch_segments:<batch_id>")
"""The names of the segments with the results of a batch that is not over, in order."""
batches_key = _each("batches:<tenant>")
"""The ids of a tenant's batches, by their creation in Unix milliseconds."""
batch_tokens_key = _each("batch_tokens:<tenant>")
"""The tokens of each of a tenant's batches that is not over."""
open_batches_key = _each("open_batches:<model>")
"""The ids of a model's batches that are not over, by their deadlines."""
batch_news_key = _each("batch_news:<model>")
"""The ids of batches that were created or cancelled, until the leader has read that."""
batch_leader_key = _each("batch_leader:<model>")
"""Which ingress works on a model's batches: the token of its lease."""

revoked_key = _one("revoked")
"""The digests of API keys that were revoked, by when each is forgotten."""
key_uses_key = _one("key_uses")
"""The ids of API keys, by when each was used last, in Unix seconds."""

outbox_key = _one("webhooks")
"""Events that have just happened, until an ingress sorts them (`webhooks/outbox.lua`)."""
routes_key = _one("webhooks:routes")
"""The routes of deliveries, by when each has something to do."""
route_key = _each("webhooks:routes:<route>")
"""The deliveries of a route, by when each is due. `webhooks/outbox.lua` makes the same name."""
deliveries_key = _one("webhooks:waiting")
"""All deliveries that wait, by when their event happened."""
delivery_counts_key = _one("webhooks:tenants")
"""How many of them each tenant has."""
held_routes_key = _one("webhooks:held")
"""Until when an ingress holds a route, or it pauses."""
dead_deliveries_key = _one("webhooks:dead")
"""Deliveries that were given up."""

suspect_key = _one("suspect")
"""A lock under which requests that have killed engines run one at a time."""

file_key = _each("file:<file_id>")
"""What is known of a file, in JSON."""
files_key = _each("files:<tenant>")
"""The ids of a tenant's files, by their creation in Unix milliseconds."""
file_bytes_key = _one("file_bytes")
"""The bytes of all files of each tenant."""
expiring_files_key = _one("expiring_files")
"""The ids of the files that expire, by when they do, in Unix seconds."""
file_upload_key = _each("file_upload:<digest>")
"""The file of an `Idempotency-Key`, and a digest of what was uploaded."""
files_sweep_key = _one("files_sweep")
"""A lock under which one ingress deletes expired files."""

metrics_key = _each("metrics:<replica>")
"""The metrics page of a process, compressed, for the ingress that answers `/metrics`."""


def trial_key(namespace: str, process: str, part: str) -> str:
    """What a process writes to try whether Redis can be used (`redis/check.py`)."""
    return f"{namespace}:try:{process}:{part}"


trial_channel = _each("try:<process>")
"""The same for a message."""
