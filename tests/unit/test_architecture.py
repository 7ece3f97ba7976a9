"""The import direction, one owner per library, and sizes (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from tests.tables import each

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for package in ("serve_app", "workers") for path in (ROOT / package).rglob("*.py")
)
NAMES = {
    path: path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__")
    for path in FILES
}
MODULES = {name.replace("/", "."): path for path, name in NAMES.items()}

PURE = (
    "serve_app.settings",
    "serve_app.redis.configuration",
    "serve_app.redis.keyspace",
    "serve_app.redis.replies",
    "serve_app.clock",
    "serve_app.timings",
    "serve_app.errors",
    "serve_app.redaction",
    "serve_app.contract",
    "serve_app.cluster.replicas",
    "serve_app.cluster.members",
    "serve_app.batches.lines",
    "serve_app.webhooks.events",
    *(f"serve_app.journal.{name}" for name in "entries events reader attempt_log usage".split()),
    *(f"serve_app.ingress.validation.{name}" for name in "bodies fields structure".split()),
    *(module for module in MODULES if module.startswith("serve_app.policy.")),
)
IMPURE_LIBRARIES = {
    "ray",
    "redis",
    "hiredis",
    "fastapi",
    "starlette",
    "vllm",
    "torch",
    "prometheus_client",
}

# Who may import a library, at any depth of the file. A name covers the package below it.
OWNERS = {
    "fastapi": ("serve_app.ingress",),
    "starlette": ("serve_app.ingress",),
    "uvicorn": ("serve_app.ingress.client_connections", "serve_app.deploy", "serve_app.cli.attach"),
    "hiredis": ("serve_app.redis",),
    "httpx": (
        "serve_app.client",
        "serve_app.cli",
        "serve_app.demo",
        "serve_app.local.service",
        "serve_app.webhooks.post",
    ),
    "rich": ("serve_app.demo",),
    "redis": ("serve_app.demo.faults",),  # as an operator
    "xgrammar": ("workers.grammars",),
    "vllm": (
        "workers.vllm_engine",
        "workers.resumable",
        "workers.grammars",
        "workers.engine_plugin",
        "workers.continuation",
        "workers.determinism",
        "workers.vllm_failures",
        "workers.messages",
        "workers.responses",
        "workers.answers",
    ),
    "ray": ("serve_app.cli.deploy_code", "serve_app.deploy", "serve_app.cluster.serve_router"),
    "prometheus_client": (
        "serve_app.observability.ingress_metrics",
        "serve_app.observability.metrics",
        "serve_app.observability.metrics_pages",
    ),
    "time": (
        "serve_app.clock",
        "serve_app.client",
        "serve_app.cli.deploy_code",  # waits for a real cluster
        "serve_app.local",  # waits for processes
        "serve_app.demo",  # the same
        "workers.loop_watch",  # CPU time of a thread
        "workers.engine_plugin",  # the same
        "workers.simulated_engine",  # the same
        "workers.determinism",  # vLLM's `time.time`, replaced
    ),
    "typer": ("serve_app.cli",),
    "opentelemetry": ("serve_app.observability.tracing",),
    "obstore": ("serve_app.files.storage",),
    "python_multipart": ("serve_app.ingress.forms",),
    "pythonjsonlogger": ("serve_app.observability.logs",),
}

# From the top to the bottom; a module imports from its own layer and from those below.
LAYERS = (
    ("serve_app.demo", "serve_app.local", "serve_app.cli"),
    ("serve_app.deploy", "serve_app.client"),
    ("serve_app.processes",),
    ("serve_app.ingress", "serve_app.batches", "workers"),
    ("serve_app.admission", "serve_app.dispatch"),
    ("serve_app.cluster",),
    ("serve_app.foundation",),
    (
        "serve_app.request_queue",
        "serve_app.requests",
        "serve_app.files",
        "serve_app.webhooks",
    ),
    ("serve_app.journal",),
    ("serve_app.redis", "serve_app.observability", "serve_app.loops", "serve_app.policy"),
    (
        "serve_app.settings",
        "serve_app.errors",
        "serve_app.redaction",
        "serve_app.clock",
        "serve_app.timings",
        "serve_app.contract",
    ),
)

# Who may not import whom, though the layers would allow it.
APART = (
    ("workers", "serve_app.dispatch"),
    ("workers", "serve_app.admission"),
    ("serve_app.dispatch", "workers"),
    ("serve_app.dispatch", "serve_app.admission"),
    ("serve_app.admission", "serve_app.dispatch"),
)

TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
MAX_FILE_LINES = 600


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, at_once: bool = False) -> Iterator[str]:
    """Everything that a file imports, or what it imports as soon as it is loaded; `from x import y`
    counts as both `x` and `x.y`.
    """
    for node in tree(path).body if at_once else ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def covers(name: str, module: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def reached(module: str, seen: set[str], at_once: bool = False) -> set[str]:
    """Our modules that are loaded when this one is imported, or used; including its packages."""
    parts = module.split(".")
    for name in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
        if name in MODULES and name not in seen:
            seen.add(name)
            for imported in imports(MODULES[name], at_once):
                reached(imported, seen, at_once)
    return seen


@each("module", PURE)
def test_a_pure_module_reaches_no_impure_library_even_through_others(module: str) -> None:
    for name in reached(module, set()):
        libraries = {imported.split(".")[0] for imported in imports(MODULES[name])}
        assert not libraries & IMPURE_LIBRARIES, (
            f"{module} imports {name}, which imports {libraries}"
        )


@each("module", ["serve_app.deploy", "workers.vllm_engine"])
def test_vllm_is_imported_when_its_environment_is_set(module: str) -> None:
    """It reads some variables when it is imported, and `VllmEngine.start` sets them."""
    for name in reached(module, set(), at_once=True):
        found = [one for one in imports(MODULES[name], at_once=True) if covers("vllm", one)]
        assert not found, f"{module} imports {name}, which imports {found}"


@each("library", OWNERS)
def test_every_library_has_its_owners_and_no_others(library: str) -> None:
    users = {
        module
        for module, path in MODULES.items()
        if any(covers(library, name) for name in imports(path))
    }
    strangers = {
        user for user in users if not any(covers(owner, user) for owner in OWNERS[library])
    }
    assert not strangers
    unused = {owner for owner in OWNERS[library] if not any(covers(owner, user) for user in users)}
    assert not unused, "an allowance that nobody needs"


def layer(module: str) -> int:
    (found,) = [
        level for level, names in enumerate(LAYERS) if any(covers(name, module) for name in names)
    ]
    return found


def test_imports_go_down_and_never_up() -> None:
    upwards = [
        f"{module} imports {imported}"
        for module, path in MODULES.items()
        for imported in imports(path)
        if "serve_app" not in (module, imported) and imported in MODULES
        if layer(imported) < layer(module)
    ]
    assert not upwards, "\n".join(upwards)


@each("importer, imported", APART)
def test_separate_packages_do_not_import_each_other(importer: str, imported: str) -> None:
    for module, path in MODULES.items():
        if covers(importer, module):
            assert not any(covers(imported, name) for name in imports(path)), module


@each("module", [m for m in MODULES if covers("serve_app.policy", m)])
def test_policies_know_nothing_of_ours_but_the_words_and_the_clock(module: str) -> None:
    known = ("serve_app.policy", "serve_app.contract", "serve_app.errors", "serve_app.clock")
    for imported in imports(MODULES[module]):
        if imported in MODULES and imported != "serve_app":
            assert any(covers(name, imported) for name in known), f"{module} imports {imported}"


def test_a_file_can_be_read_in_one_sitting() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (*FILES, *SCRIPTS, *TESTS)}
    long = [f"{path}: {lines}" for path, lines in lengths.items() if lines > MAX_FILE_LINES]
    assert not long, "\n".join(long)


# Bounds of sizes, and what others read (buckets, pictures), are no timings.
TIMES = re.compile(r"^_?[A-Z][A-Z_]*_(S|MS)$")
NOT_TIMINGS = {  # buckets
    "serve_app.observability.metrics": ("_BOUNDS_S",),
}


def constants(path: Path) -> Iterator[str]:
    for node in tree(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_times_stand_in_one_place() -> None:
    """The client is installed without the service, and what starts one without its packages: they
    keep their own.
    """
    found = {
        module: names
        for module, path in MODULES.items()
        if module != "serve_app.timings"
        if not any(
            covers(name, module)
            for name in ("serve_app.client", "serve_app.local", "serve_app.demo")
        )
        if (names := tuple(name for name in constants(path) if TIMES.match(name)))
    }
    assert found == NOT_TIMINGS


CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "memory_info", "RunningTime"}
PAGES = ("statm", "VmRSS")
NO_VERDICTS = {  # what reads a clock or a page of memory, and judges nothing by it
    "tests.waiting::until": "its deadline only ends a wait that would have no end",
    "tests.service.support::settled": "the same",
    "tests.journal.test_redis_starts_again::pauses_s": "a figure for who reads the output",
    "tests.unit.test_activity_metrics::compute": "computes for so long",
}


def functions(node: ast.AST, marks: str = "") -> Iterator[tuple[ast.AST, str, bool]]:
    """Those of a module and of its classes, by name, and whether they have the mark `clock`: their
    own, their class's or their module's.
    """
    for inner in getattr(node, "body", ()):
        if isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == "pytestmark":
            marks += ast.unparse(inner)
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            its = marks + "".join(map(ast.unparse, inner.decorator_list))
            if isinstance(inner, ast.ClassDef):
                yield from functions(inner, its)
            else:
                yield inner, inner.name, "pytest.mark.clock" in its


def names(module: str, tree: ast.Module, function: ast.AST) -> Iterator[str]:
    """What a function refers to: `module::name`, and clocks and pages as they are."""
    imported = {
        alias.name: f"{node.module}::{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            its = imported.get(name) if isinstance(node, ast.Name) else None
            yield name if name in CLOCKS else its or f"{module}::{name}"
        elif isinstance(node, ast.Constant):
            yield from (page for page in PAGES if page in str(node.value))


def unmarked(files: dict[str, ast.Module], allowed: Collection[str]) -> set[str]:
    """The tests without the mark `clock` that read a clock, themselves or in what they call."""
    refers, marked = dict[str, set[str]](), set[str]()
    for module, tree in files.items():
        for function, name, its_mark in functions(tree):
            refers.setdefault(f"{module}::{name}", set()).update(names(module, tree, function))
            marked |= {f"{module}::{name}"} if its_mark else set()
    reading, before = CLOCKS | set(PAGES), set[str]()
    while before != reading:
        before = set(reading)
        reading |= {name for name, its in refers.items() if its & (before - set(allowed))}
    tests = {name for name in refers if name.split("::")[1].startswith("test_")}
    return (reading & tests) - marked


def test_what_depends_on_a_clock_says_so() -> None:
    """The gate leaves out what has the mark, so no slow machine can fail it."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): tree(path) for path in TESTS}
    found = unmarked(files, NO_VERDICTS)
    assert not found, "without the mark `clock`:\n" + "\n".join(sorted(found))
