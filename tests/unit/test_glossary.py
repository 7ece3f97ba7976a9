"""What users, operators and developers read has the words of docs/glossary.md, and none that it
replaces: documents, descriptions, messages, log lines, and the names in the code.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
WORDS = """accept claim attempt epoch fence append notify follow complete retry lease slot
reservation retain replay resume window tenant class poison"""
CODE = (
    "serve_app/settings/*.py",
    "serve_app/observability/*metrics*.py",
    "serve_app/cli/*.py",
    "serve_app/errors.py",
    "workers/vllm_failures.py",
    "serve_app/journal/reader.py",
)
"""Files whose texts are read: descriptions, messages and the help of commands."""

Line = tuple[Path, int, str]


def rows() -> list[tuple[str, str, str]]:
    """Word, meaning, and the words that are not to be used instead."""
    return re.findall(r"^\| (\w+) \| (.+) \| (.+) \|$", GLOSSARY.read_text(), re.MULTILINE)[1:]


def documents() -> Iterator[Line]:
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        if page == GLOSSARY:
            continue
        fenced = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            fenced ^= line.lstrip().startswith("```")
            if not fenced:
                yield page, number, re.sub(r"\]\([^)]*\)", "]", line)


def texts_of_code() -> Iterator[Line]:
    for file in sorted(path for pattern in CODE for path in ROOT.glob(pattern)):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield file, node.lineno, " ".join(node.value.split())


def texts_of_monitoring() -> Iterator[Line]:
    folder = ROOT / "helm" / "hermes-serve" / "files"
    for number, line in enumerate((folder / "alerts.yaml").read_text().splitlines(), 1):
        if "summary:" in line:
            yield folder / "alerts.yaml", number, line
    dashboard = folder / "dashboard.json"
    for panel in json.loads(dashboard.read_text())["panels"]:
        yield dashboard, 1, panel["title"]


def code() -> Iterator[tuple[Path, Any]]:
    """Every node of the service's code."""
    for file in sorted(
        path for top in ("serve_app", "workers") for path in ROOT.glob(f"{top}/**/*.py")
    ):
        yield from ((file, node) for node in ast.walk(ast.parse(file.read_text())))


def log_lines() -> Iterator[Line]:
    for file, node in code():
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log")), args=[first, *_]):
                for part in ast.walk(first):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield file, part.lineno, part.value


def names() -> Iterator[Line]:
    """The names that the code defines, as words: `AttemptLog` is "Attempt Log"."""
    for file, node in code():
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                name = node.name
            case ast.arg():
                name = node.arg
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").strip()
        yield file, node.lineno, words


def wrong_words(text: str, forbidden: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Words in prose that the glossary replaces, each with the word to use."""
    prose = re.sub(r"`[^`]*`", "", text)
    for said, word in forbidden.items():
        found = re.search(rf"(?<![\w./-]){said}(?:s|es|d|ed|ing)?(?![\w/-])", prose, re.IGNORECASE)
        if found:
            yield found[0], word


FORBIDDEN = {
    said.replace(" ", r"\s+"): word for word, _, others in rows() for said in others.split(", ")
}


def test_the_glossary_explains_each_of_its_words_once() -> None:
    assert [word for word, _, _ in rows()] == WORDS.split()


def test_no_text_has_another_word_for_one_of_the_glossary() -> None:
    lines = [*documents(), *texts_of_code(), *texts_of_monitoring(), *log_lines(), *names()]
    assert {path.suffix for path, _, _ in lines} == {".md", ".py", ".yaml", ".json"}
    assert [
        f"{path.relative_to(ROOT)}:{number}: '{said}': the glossary's word is '{word}'"
        for path, number, text in lines
        for said, word in wrong_words(text, FORBIDDEN)
    ] == []


def test_a_wrong_word_is_found_in_prose_and_not_in_code() -> None:
    assert list(wrong_words("Customers wait.", FORBIDDEN)) == [("Customers", "tenant")]
    assert list(wrong_words("a priority  class", FORBIDDEN)) == [("priority  class", "class")]
    assert list(wrong_words("`customer` and my-customer.example", FORBIDDEN)) == []
