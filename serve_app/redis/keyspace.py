"""The name of every key and channel of the service in Redis. Pure. docs/redis-keys.md has their
types, writers and lifetimes.

No other module composes a name. All names begin with the namespace, which is all that the service's
Redis user may access (`cluster/redis.acl`).
"""

from __future__ import annotations


def journal_key(namespace: str, request_id: str) -> str:
    """The journal of a request: the only authoritative record of it."""
    return f"{namespace}:j:{request_id}"


def body_key(namespace: str, request_id: str) -> str:
    """The body of a request, apart from its journal, which many read."""
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
    """The ids of a tenant's latest stored chat completions, by their admission."""
    return f"{namespace}:c:{tenant}"


def metadata_key(namespace: str, request_id: str) -> str:
    """The metadata of a stored chat completion, if they were changed."""
    return f"{namespace}:m:{request_id}"


def kept_key(namespace: str, tenant: str) -> str:
    """Bytes of a tenant's (without a name: of all) answers, by the hour in which they expire."""
    return f"{namespace}:k:{tenant}"


def usage_key(namespace: str, hour: int) -> str:
    """The ledger of an hour (since 1970): what the requests have used that ended in it."""
    return f"{namespace}:u:{hour}"


def readers_key(namespace: str, request_id: str) -> str:
    """The ingresses that hold a connection of a request's client, as long as they live."""
    return f"{namespace}:a:{request_id}"


def twins_key(namespace: str, digest: str) -> str:
    """Equal requests without an `Idempotency-Key`, which a retry may join, and whose ingress reads
    them.
    """
    return f"{namespace}:t:{digest}"


def limits_key(namespace: str, tenant: str) -> str:
    """What a tenant has used of its limits (`requests/lifecycle.lua`)."""
    return f"{namespace}:limits:{tenant}"


def running_key(namespace: str, tenant: str) -> str:
    """A limited tenant's requests that have not ended, by when they have for certain."""
    return f"{namespace}:running:{tenant}"


def wake_channel(namespace: str, ingress_id: str) -> str:
    """Wake-ups for an ingress: the new entries of the journals that it follows."""
    return f"{namespace}:w:{ingress_id}"


def service_key(namespace: str) -> str:
    """The name of the service to which the namespace belongs, as long as it has an ingress."""
    return f"{namespace}:service"


def cluster_key(namespace: str, cluster: str) -> str:
    """When a Ray cluster entered the namespace, in Unix milliseconds."""
    return f"{namespace}:cluster:{cluster}"


def models_key(namespace: str) -> str:
    """The models whose requests may wait, by when an ingress served them last."""
    return f"{namespace}:models"


def ingresses_key(namespace: str) -> str:
    """The living ingresses, by the end of their leases."""
    return f"{namespace}:ingresses"


def workers_key(namespace: str) -> str:
    """The living workers and their capacity, by the end of their leases."""
    return f"{namespace}:workers"


def engines_key(namespace: str) -> str:
    """What the living workers' engines have and use, by the end of their leases."""
    return f"{namespace}:engines"


def calls_key(namespace: str) -> str:
    """Where the living workers take calls, by the end of their leases."""
    return f"{namespace}:calls"


def batch_key(namespace: str, batch_id: str) -> str:
    """A batch: its facts, its state, its counts and what it has used (`batches/batches.lua`)."""
    return f"{namespace}:batch:{batch_id}"


def batch_lines_key(namespace: str, batch_id: str) -> str:
    """The lines of a batch that are taken and have no result in a segment, and the try of each."""
    return f"{namespace}:batch_lines:{batch_id}"


def batch_segments_key(namespace: str, batch_id: str) -> str:
    """The names of the segments with the results of a batch that is not over, in order."""
    return f"{namespace}:batch_segments:{batch_id}"


def batches_key(namespace: str, tenant: str) -> str:
    """The ids of a tenant's batches, by their creation in Unix milliseconds."""
    return f"{namespace}:batches:{tenant}"


def batch_tokens_key(namespace: str, tenant: str) -> str:
    """The tokens of each of a tenant's batches that is not over."""
    return f"{namespace}:batch_tokens:{tenant}"


def open_batches_key(namespace: str, model: str) -> str:
    """The ids of a model's batches that are not over, by their deadlines."""
    return f"{namespace}:open_batches:{model}"


def batch_news_key(namespace: str, model: str) -> str:
    """The ids of batches that were created or cancelled, until the leader has read that."""
    return f"{namespace}:batch_news:{model}"


def batch_leader_key(namespace: str, model: str) -> str:
    """Which ingress works on a model's batches: the token of its lease."""
    return f"{namespace}:batch_leader:{model}"


def revoked_key(namespace: str) -> str:
    """The digests of API keys that were revoked, by when each is forgotten."""
    return f"{namespace}:revoked"


def key_uses_key(namespace: str) -> str:
    """The ids of API keys, by when each was used last, in Unix seconds."""
    return f"{namespace}:key_uses"


def outbox_key(namespace: str) -> str:
    """Events that have just happened, until an ingress sorts them (`webhooks/outbox.lua`)."""
    return f"{namespace}:webhooks"


def routes_key(namespace: str) -> str:
    """The routes of deliveries, by when each has something to do."""
    return f"{namespace}:webhooks:routes"


def route_key(namespace: str, route: str) -> str:
    """The deliveries of a route, by when each is due. `webhooks/outbox.lua` makes the same name."""
    return f"{namespace}:webhooks:routes:{route}"


def deliveries_key(namespace: str) -> str:
    """All deliveries that wait, by when their event happened."""
    return f"{namespace}:webhooks:waiting"


def delivery_counts_key(namespace: str) -> str:
    """How many of them each tenant has."""
    return f"{namespace}:webhooks:tenants"


def held_routes_key(namespace: str) -> str:
    """Until when an ingress holds a route, or it pauses."""
    return f"{namespace}:webhooks:held"


def dead_deliveries_key(namespace: str) -> str:
    """Deliveries that were given up."""
    return f"{namespace}:webhooks:dead"


def suspect_key(namespace: str) -> str:
    """A lock under which requests that have killed engines run one at a time."""
    return f"{namespace}:suspect"


def file_key(namespace: str, file_id: str) -> str:
    """What is known of a file, in JSON."""
    return f"{namespace}:file:{file_id}"


def files_key(namespace: str, tenant: str) -> str:
    """The ids of a tenant's files, by their creation in Unix milliseconds."""
    return f"{namespace}:files:{tenant}"


def file_bytes_key(namespace: str) -> str:
    """The bytes of all files of each tenant."""
    return f"{namespace}:file_bytes"


def expiring_files_key(namespace: str) -> str:
    """The ids of the files that expire, by when they do, in Unix seconds."""
    return f"{namespace}:expiring_files"


def file_upload_key(namespace: str, digest: str) -> str:
    """The file of an `Idempotency-Key`, and a digest of what was uploaded."""
    return f"{namespace}:file_upload:{digest}"


def files_sweep_key(namespace: str) -> str:
    """A lock under which one ingress deletes expired files."""
    return f"{namespace}:files_sweep"


def metrics_key(namespace: str, replica: str) -> str:
    """The metrics page of a process, compressed, for the ingress that answers `/metrics`."""
    return f"{namespace}:metrics:{replica}"


def trial_key(namespace: str, process: str, part: str) -> str:
    """What a process writes to try whether Redis can be used (`redis/check.py`)."""
    return f"{namespace}:try:{process}:{part}"


def trial_channel(namespace: str, process: str) -> str:
    """The same for a message."""
    return f"{namespace}:try:{process}"
