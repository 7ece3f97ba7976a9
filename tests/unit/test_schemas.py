"""Only one place knows each format in Redis: no other module uses a field's letter, or the sequence
number of an opening.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(path for package in ("serve_app", "workers") for path in (ROOT / package).rglob("*"))
PATHS = [path.relative_to(ROOT).as_posix() for path in FILES if path.suffix == ".py"]
KNOW_LETTERS = {
    "serve_app/journal/entries.py",
    "serve_app/request_queue/entry.py",
    "serve_app/request_queue/dead_letters.py",
}
KNOW_IDS = {"serve_app/journal/ids.py", "serve_app/journal/entries.py"}


def test_a_fields_letter_is_known_to_its_schema_alone() -> None:
    found = [
        f"{path}:{node.lineno}: {node.value!r}"
        for path in PATHS
        if path not in KNOW_LETTERS
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, bytes)
        and len(node.value) == 1
        and node.value.isalpha()
    ]
    assert not found, "\n".join(found)


def test_what_an_ids_sequence_number_means_is_known_to_the_ids_alone() -> None:
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in PATHS
        if path not in KNOW_IDS
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Compare)
        and any(isinstance(side, ast.Constant) for side in node.comparators)
        and isinstance(node.left, ast.Attribute)
        and node.left.attr == "seq"
    ]
    assert not found, "\n".join(found)


def test_an_entrys_id_is_made_by_its_name_or_from_a_number_that_is_no_constant() -> None:
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in PATHS
        if path not in KNOW_IDS
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "EntryId"
        and any(isinstance(argument, ast.Constant) for argument in node.args)
    ]
    assert not found, "\n".join(found)
