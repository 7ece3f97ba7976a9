"""The import direction, one owner per library, sizes, and docstrings (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for package in ("serve_app", "workers") for path in (ROOT / package).rglob("*.py"))
NAMES = {path: path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__") for path in FILES}
MODULES = {name.replace("/", "."): path for path, name in NAMES.items()}

PURE = (
    "serve_app.settings", "serve_app.door_settings", "serve_app.request_limits", "serve_app.section",
    "serve_app.storage",
    "serve_app.redis_address", "serve_app.redis_clock", "serve_app.errors",
    "serve_app.waits", "serve_app.attempts", "serve_app.request_queue.entry",
    "serve_app.scheduling.order",
    "serve_app.routing.key",
    "serve_app.routing.ring", "serve_app.routing.fleet", "serve_app.journal.entries", "serve_app.journal.events",
    "serve_app.journal.reader",
    "serve_app.journal.attempt", "serve_app.ingress.validation", "serve_app.ingress.structure",
    "serve_app.ingress.limits",
)  # fmt: skip
IMPURE_LIBRARIES = {"ray", "redis", "hiredis", "fastapi", "starlette", "vllm", "torch", "prometheus_client"}

# Who may import a library, at any depth of the file. A name covers the package below it.
OWNERS = {
    "fastapi": ("serve_app.ingress",),
    "starlette": ("serve_app.ingress",),
    "hiredis": ("serve_app.journal",),
    "httpx": ("serve_app.client",),
    "redis": (
        "serve_app.journal", "serve_app.request_queue",
        # The few that share the client for leases and snapshots:
        "serve_app.membership", "serve_app.snapshots", "serve_app.ingress.departures",
    ),
    "vllm": ("workers.vllm_engine", "workers.resumable", "workers.seam", "workers.equal_values"),
    "ray": ("serve_app.deploy", "serve_app.routing.serve_router"),
    "prometheus_client": ("serve_app.telemetry",),
    "opentelemetry": ("serve_app.tracing",),
    "pythonjsonlogger": ("serve_app.logs",),
}  # fmt: skip

# From the top to the bottom; a module imports from its own layer and from those below.
LAYERS = (
    ("serve_app.deploy", "serve_app.client"),
    ("serve_app.ingress", "workers"),
    ("serve_app.dispatcher", "serve_app.carrier", "serve_app.adopted", "serve_app.deadlines"),
    ("serve_app.membership", "serve_app.snapshots", "serve_app.request_queue", "serve_app.routing"),
    ("serve_app.journal", "serve_app.scheduling"),
    (
        "serve_app.settings",
        "serve_app.door_settings",
        "serve_app.section",
        "serve_app.request_limits",
        "serve_app.storage",
        "serve_app.redis_address",
        "serve_app.redis_clock",
        "serve_app.errors",
        "serve_app.telemetry",
        "serve_app.tracing",
        "serve_app.logs",
        "serve_app.loops",
        "serve_app.waits",
        "serve_app.attempts",
    ),
)

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Everything that a file imports, `from x import y` as both `x` and `x.y`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def covers(name: str, module: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def reached(module: str, seen: set[str]) -> set[str]:
    """Our modules that importing this one loads, its packages among them."""
    parts = module.split(".")
    for name in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
        if name in MODULES and name not in seen:
            seen.add(name)
            for imported in imports(MODULES[name]):
                reached(imported, seen)
    return seen


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_reaches_no_impure_library_even_through_others(module: str) -> None:
    for name in reached(module, set()):
        libraries = {imported.split(".")[0] for imported in imports(MODULES[name])}
        assert not libraries & IMPURE_LIBRARIES, f"{module} imports {name}, which imports {libraries}"


@pytest.mark.parametrize("library", OWNERS)
def test_every_library_has_its_owners_and_no_others(library: str) -> None:
    users = {module for module, path in MODULES.items() if any(covers(library, name) for name in imports(path))}
    strangers = {user for user in users if not any(covers(owner, user) for owner in OWNERS[library])}
    assert not strangers
    unused = {owner for owner in OWNERS[library] if not any(covers(owner, user) for user in users)}
    assert not unused, "an allowance that nobody needs"


def layer(module: str) -> int:
    (found,) = [level for level, names in enumerate(LAYERS) if any(covers(name, module) for name in names)]
    return found


@pytest.mark.parametrize("module", [name for name in MODULES if name != "serve_app"])
def test_imports_go_down_and_never_up(module: str) -> None:
    for imported in imports(MODULES[module]):
        if imported in MODULES and imported != "serve_app":
            assert layer(imported) >= layer(module), f"{module} imports {imported}"


@pytest.mark.parametrize("path", FILES, ids=NAMES.__getitem__)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # `routes` only holds the endpoints, which are functions of their own.
            inner = sum(_lines(child) for child in node.body if isinstance(child, ast.AsyncFunctionDef))
            assert _lines(node) - inner <= MAX_FUNCTION_LINES, node.name


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def public(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Public classes and functions, and what is public in those classes."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name.startswith("_") or (prefix and child.name in INTERFACES.get(prefix, ())):
                continue
            yield f"{prefix}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{child.name}.")


# Methods whose meaning is that of the interface which they implement.
INTERFACES = {
    "RespConnection.": ("connection_made", "data_received", "connection_lost"),
    "_Families.": ("collect",),
}


@pytest.mark.parametrize("path", FILES, ids=NAMES.__getitem__)
def test_everything_public_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree(path)), "the module"
    silent = [name for name, node in public(tree(path)) if not ast.get_docstring(node)]  # type: ignore[arg-type]
    assert not silent
