"""Finds tests whose verdict depends on how long something took, or on how much memory it held.

A name is measured if something measured is assigned to it, appended to it or iterated into it; so
is a field, within its module. A function measures if it returns something measured. It judges if it
asserts how something measured compares with something else, or calls a function that judges.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

_CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time"}
_CLOCKS |= {f"{name}_ns" for name in _CLOCKS}
_PAGES = ("statm", "VmRSS")
_SOURCES = {"RunningTime", "memory_info", *_CLOCKS, *_PAGES}
_SOURCES |= {f".{name}" for name in _SOURCES}
_COMPARED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class _Function:
    """What matters of a function and of the functions inside it. Whatever an expression consists of
    are words: `name`, `.field`, and `module::function` for a call.
    """

    def __init__(self, module: str, node: ast.AST, imported: Mapping[str, str]) -> None:
        self._module, self._imported = module, imported
        self.assigned: list[tuple[str, set[str]]] = []
        self.returned: set[str] = set()
        self.compared: list[set[str]] = []
        self.called: set[str] = set()
        for part in ast.walk(node):
            self.called |= {word for word in self._own_words(part) if "::" in word}
            for target, value in _assigned(part):
                words = self._words(value)
                self.assigned += [(word, words) for word in _targets(target)]
            if isinstance(part, ast.Return | ast.Yield) and part.value:
                self.returned |= self._words(part.value)
            fails = isinstance(part, ast.If) and isinstance(part.body[-1], ast.Raise)
            if isinstance(part, ast.Assert) or fails:
                compares = [one for one in ast.walk(part.test) if _is_compared(one)]  # type: ignore[attr-defined]
                self.compared += map(self._words, compares)

    def _words(self, expression: ast.AST) -> set[str]:
        return {word for node in ast.walk(expression) for word in self._own_words(node)}

    def _own_words(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield f".{node.attr}"
        elif isinstance(node, ast.Constant):
            yield from (page for page in _PAGES if page in str(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield self._imported.get(node.func.id, f"{self._module}::{node.func.id}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield f"{self._module}::{node.func.attr}"

    def measured(self, known: set[str]) -> set[str]:
        """The words of what is measured in it. `known`: those that are anyway."""
        found, count = set(known), -1
        while count != len(found):
            count = len(found)
            found |= {word for word, words in self.assigned if not words.isdisjoint(found)}
        return found


def judging(files: Mapping[str, ast.Module], allowed: Collection[str] = ()) -> set[str]:
    """The functions that judge, each as `module::name`, whether they have a mark or not.

    Args:
        files: the modules, by their dotted names.
        allowed: functions, in the same form, whose callers may call them.
    """
    functions: dict[str, _Function] = {}
    for module, tree in files.items():
        imported = {
            alias.asname or alias.name: f"{node.module}::{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for one in _functions(tree):
            functions[f"{module}::{one.name}"] = _Function(module, one, imported)
    measures, judges = set[str](), set[str]()
    fields = {module: set[str]() for module in files}
    size = -1
    while size != (size := sum(map(len, (measures, judges, *fields.values())))):
        for name, function in functions.items():
            of_module = fields[name.split("::")[0]]
            measured = function.measured(_SOURCES | measures | of_module)
            of_module |= {word for word in measured - _SOURCES if word.startswith(".")}
            if name not in allowed and not function.returned.isdisjoint(measured):
                measures.add(name)
            compares = any(not words.isdisjoint(measured) for words in function.compared)
            if compares or not function.called.isdisjoint(judges.difference(allowed)):
                judges.add(name)
    return judges


def marked(files: Mapping[str, ast.Module]) -> set[str]:
    """The functions with the mark `clock`: their own, their class's, or their module's."""
    found = set[str]()
    for module, tree in files.items():
        whole = [node for node in tree.body if ast.unparse(node).startswith("pytestmark = ")]
        for node in tree.body:
            for one in _functions(node):
                marks = [*one.decorator_list, *getattr(node, "decorator_list", ()), *whole]
                if any("pytest.mark.clock" in ast.unparse(mark) for mark in marks):
                    found.add(f"{module}::{one.name}")
    return found


def parsed(root: Path, folder: str) -> dict[str, ast.Module]:
    """All modules of a folder, by their dotted names."""
    paths = {path.relative_to(root).with_suffix(""): path for path in (root / folder).rglob("*.py")}
    return {".".join(name.parts): ast.parse(path.read_text()) for name, path in paths.items()}


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """A function, or those of a class or a module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    elif isinstance(node, ast.ClassDef | ast.Module):
        for inner in node.body:
            yield from _functions(inner)


def _is_compared(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and (
        any(isinstance(op, _COMPARED) for op in node.ops) or "approx(" in ast.unparse(node)
    )


def _assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Targets, and what becomes of them."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars:
        yield node.optional_vars, node.context_expr
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("append", "add", "extend")
    ):
        yield from ((node.func.value, argument) for argument in node.args)


def _targets(target: ast.AST) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute):
        yield f".{target.attr}"
    elif isinstance(target, ast.Subscript | ast.Starred):
        yield from _targets(target.value)
    elif isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _targets(part)
