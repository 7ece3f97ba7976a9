"""The table of all Redis keys is complete, covered by the permissions of Redis's users, and the
only place that composes names.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from serve_app.redis import keyspace
from serve_app.redis.keyspace import KINDS, Kind, Type
from tests.tables import each

ROOT = Path(__file__).parents[2]
NAMES = {
    "journal_key": "n:j:a",
    "body_key": "n:b:a",
    "queue_key": "n:q:a:b",
    "dead_letters_key": "n:dead",
    "later_request_key": "n:i:a",
    "requests_key": "n:r:a",
    "chats_key": "n:c:a",
    "metadata_key": "n:m:a",
    "kept_key": "n:k:a",
    "usage_key": "n:u:a",
    "readers_key": "n:a:a",
    "wake_channel": "n:w:a",
    "ingresses_key": "n:ingresses",
    "workers_key": "n:workers",
    "engines_key": "n:engines",
    "suspect_key": "n:suspect",
    "metrics_key": "n:metrics:a",
    "trial_key": "n:try:a:b",
    "trial_channel": "n:try:a",
}
CATEGORIES = {
    Type.STREAM: {"+@stream", "+@keyspace"},
    Type.STRING: {"+@string", "+@keyspace"},
    Type.SORTED_SET: {"+@sortedset", "+@keyspace"},
    Type.HASH: {"+@hash", "+@keyspace"},
    Type.ANY: {"+@stream", "+@string", "+@sortedset", "+@hash", "+@keyspace"},
    Type.CHANNEL: {"+@pubsub"},
}


def made(kind: Kind) -> str:
    parts = len(inspect.signature(kind.name).parameters)
    return kind.name(*("n", "a", "b")[:parts])


def test_a_name_never_changes_for_the_versions_before_have_written_it() -> None:
    assert {kind.name.__name__: made(kind) for kind in KINDS} == NAMES


def test_the_table_holds_every_name_that_can_be_made() -> None:
    functions = {
        name
        for name, value in vars(keyspace).items()
        if inspect.isfunction(value) and value.__module__ == keyspace.__name__
    }
    assert functions == {kind.name.__name__ for kind in KINDS}


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
@each("kind", KINDS)
def test_the_services_user_may_touch_it(file: str, namespace: str, kind: Kind) -> None:
    rules = rules_of_the_service(file, namespace)
    sign = "&" if kind.type is Type.CHANNEL else "~"
    assert any(
        fnmatchcase(made(kind), rule.removeprefix(sign)) for rule in rules if rule[0] == sign
    )
    assert CATEGORIES[kind.type] <= set(rules)


def names_put_together(path: Path) -> Iterator[int]:
    """Lines with an f-string in which something that is a namespace stands before a colon."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, after in zip(node.values, node.values[1:], strict=False):
            if not (isinstance(before, ast.FormattedValue) and isinstance(after, ast.Constant)):
                continue
            if re.search(r"namespace|\bns\b", ast.unparse(before.value)) and str(
                after.value
            ).startswith(":"):
                yield node.lineno


def test_no_other_module_composes_a_key() -> None:
    owner = ROOT / "serve_app" / "redis" / "keyspace.py"
    files = [path for folder in ("serve_app", "workers") for path in (ROOT / folder).rglob("*.py")]
    files += [*(ROOT / "scripts" / "chaos_testing").rglob("*.py")]
    found = {path: list(names_put_together(path)) for path in files}
    assert len(found.pop(owner)) == len(KINDS), "what finds names finds all of them"
    assert not {path: lines for path, lines in found.items() if lines}
