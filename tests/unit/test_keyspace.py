"""docs/redis-keys.md has every key in Redis, the service's user may touch it, and one module makes
the names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

from serve_app.redis import keyspace
from tests.tables import each

ROOT = Path(__file__).parents[2]
NAMES = {
    "journal_key": "n:j:a",
    "body_key": "n:b:a",
    "queue_key": "n:q:a:b",
    "due_key": "n:due",
    "dead_letters_key": "n:dead",
    "later_request_key": "n:i:a",
    "requests_key": "n:r:a",
    "chats_key": "n:c:a",
    "metadata_key": "n:m:a",
    "kept_key": "n:k:a",
    "usage_key": "n:u:a",
    "readers_key": "n:a:a",
    "twins_key": "n:t:a",
    "limits_key": "n:limits:a",
    "running_key": "n:running:a",
    "wake_channel": "n:w:a",
    "service_key": "n:service",
    "cluster_key": "n:cluster:a",
    "models_key": "n:models",
    "ingresses_key": "n:ingresses",
    "workers_key": "n:workers",
    "engines_key": "n:engines",
    "calls_key": "n:calls",
    "batch_key": "n:batch:a",
    "batch_lines_key": "n:batch_lines:a",
    "batch_segments_key": "n:batch_segments:a",
    "batches_key": "n:batches:a",
    "batch_tokens_key": "n:batch_tokens:a",
    "open_batches_key": "n:open_batches:a",
    "batch_news_key": "n:batch_news:a",
    "batch_leader_key": "n:batch_leader:a",
    "revoked_key": "n:revoked",
    "key_uses_key": "n:key_uses",
    "outbox_key": "n:webhooks",
    "routes_key": "n:webhooks:routes",
    "route_key": "n:webhooks:routes:a",
    "deliveries_key": "n:webhooks:waiting",
    "delivery_counts_key": "n:webhooks:tenants",
    "held_routes_key": "n:webhooks:held",
    "dead_deliveries_key": "n:webhooks:dead",
    "suspect_key": "n:suspect",
    "file_key": "n:file:a",
    "files_key": "n:files:a",
    "file_bytes_key": "n:file_bytes",
    "expiring_files_key": "n:expiring_files",
    "file_upload_key": "n:file_upload:a",
    "files_sweep_key": "n:files_sweep",
    "metrics_key": "n:metrics:a",
    "trial_key": "n:try:a:b",
    "trial_channel": "n:try:a",
}
CATEGORIES = {
    "stream": "+@stream",
    "string": "+@string",
    "sorted set": "+@sortedset",
    "hash": "+@hash",
    "channel": "+@pubsub",
}


def with_letters(pattern: str) -> str:
    """`<namespace>:j:<request_id>` as `n:j:a`."""
    letters = iter("nab")
    return re.sub("<[^>]+>", lambda _: next(letters), pattern)


KEYS: dict[str, str] = {
    with_letters(pattern): types
    for pattern, types in re.findall(
        r"^\| `(\S+)` \| ([^|]+) \|", (ROOT / "docs" / "redis-keys.md").read_text(), re.M
    )
}
"""The type, or the types, of every key of the document."""
MADE: dict[str, Callable[..., str]] = {
    name: value
    for name, value in vars(keyspace).items()
    if name.endswith(("_key", "_channel")) and callable(value)
}


def made(name: str) -> str:
    return MADE[name](*"nab"[: len(inspect.signature(MADE[name]).parameters)])


def test_a_name_never_changes_for_the_versions_before_have_written_it() -> None:
    assert {name: made(name) for name in MADE} == NAMES


def test_the_document_has_every_name_that_can_be_made() -> None:
    assert sorted(KEYS) == sorted(map(made, MADE))


def rules_of_the_service(file: str, namespace: str) -> list[str]:
    """The rules of the user `hermes`, as `cluster/redis.acl` or the chart's script has them."""
    (line,) = re.findall(r"user hermes on #[^~]+(~.*)", (ROOT / file).read_text())
    return str(line).rstrip('"').replace(namespace, "n").split()


@each(
    "file, namespace",
    [
        ("cluster/redis.acl", "hermes"),
        ("helm/hermes-serve/files/redis-users.sh", "$HERMES_NAMESPACE"),
    ],
)
@each("name", list(MADE))
def test_the_services_user_may_touch_it(file: str, namespace: str, name: str) -> None:
    rules = rules_of_the_service(file, namespace)
    types = re.split(", | or ", KEYS[made(name)])
    sign = "&" if types == ["channel"] else "~"
    assert any(
        fnmatchcase(made(name), rule.removeprefix(sign)) for rule in rules if rule[0] == sign
    )
    assert {CATEGORIES[one] for one in types} <= set(rules)
    assert sign == "&" or "+@keyspace" in rules


def test_no_other_module_composes_a_key() -> None:
    owner = ROOT / "serve_app" / "redis" / "keyspace.py"
    files = [path for folder in ("serve_app", "workers") for path in (ROOT / folder).rglob("*.py")]
    files += [*(ROOT / "scripts" / "chaos_testing").rglob("*.py")]
    composed = re.compile(r'f".*\{[^{}]*(namespace|\bns\b)[^{}]*\}:')
    found = {path: len(composed.findall(path.read_text())) for path in files}
    assert found.pop(owner), "what finds names finds them"
    assert not [path for path, times in found.items() if times]
