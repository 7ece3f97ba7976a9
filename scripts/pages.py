"""Writes the tables of documents whose rows are in the code: settings, presets, errors.
The text around them is the documents' own; a test compares both.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

from serve_app.contract import Reason
from serve_app.errors import REASONS, RequestRefused, error_body
from serve_app.settings import Settings
from serve_app.settings.tree import PRESETS
from serve_app.settings.vllm_names import VLLM

DOCS = Path(__file__).resolve().parents[1] / "docs"


def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """What is written below each setting of a section."""
    (found,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(found, ast.ClassDef)
    return {
        one.target.id: " ".join(str(below.value.value).split())
        for one, below in pairwise(found.body)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def settings(section: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        child = next(
            (c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None
        )
        if child is not None:
            yield from settings(child, f"{prefix}{name}.")
        else:
            required = field.is_required()
            default = None if required else field.get_default(call_default_factory=True)
            as_yaml = default if isinstance(default, str) else json.dumps(default)
            shown = "" if default in (None, "") else f"`{as_yaml}`"
            about = docstrings(section).get(name, field.description or "")
            yield f"| `{prefix}{name}` | {shown} | {about} |"


def presets() -> Iterator[str]:
    """A row for each setting that a preset decides."""
    for setting, field in {
        "workers.max_running_requests": "sequences",
        "engine.args.max_num_batched_tokens": "batched_tokens",
        "engine.args.gpu_memory_utilization": "memory_share",
        "workers.autoscaling.target_ongoing_requests ÷ workers.max_running_requests": "busy_share",
    }.items():
        yield f"| `{setting}` | {' | '.join(str(getattr(p, field)) for p in PRESETS.values())} |"


def errors() -> Iterator[str]:
    for reason in sorted(Reason, key=lambda one: (RequestRefused(one, "").status, one)):
        refused = RequestRefused(reason, "")
        kind = error_body(reason, "")["error"]["type"]
        again = "no" if "x-should-retry" in refused.headers() else "yes"
        yield f"| `{reason}` | {refused.status} | `{kind}` | {again} | {REASONS[reason].advice} |"


def without_effect() -> Iterator[str]:
    """A row for each path that takes fields which do nothing."""
    for path, names in VLLM["without_effect"].items():
        yield f"| `{path}` | {', '.join(f'`{name}`' for name in sorted(names))} |"


TABLES: tuple[tuple[str, str, Callable[[], Iterator[str]]], ...] = (
    ("settings.md", "| setting | default | meaning |", settings),
    ("settings.md", f"| setting | {' | '.join(f'`{name}`' for name in PRESETS)} |", presets),
    ("errors.md", "| `code` | status | `type` | retry | what to do |", errors),
    (
        "evidence/openai-schema.md",
        "| path | OpenAI's fields that vLLM does not know |",
        without_effect,
    ),
)
"""Document, first line of a table, and what gives its rows."""


def page(name: str) -> str:
    text = (DOCS / name).read_text()
    for document, head, rows in TABLES:
        if document == name:
            begin, _, rest = text.partition(f"{head}\n")
            rule, _, rest = rest.partition("\n")
            after = re.sub(r"\A(\|.*\n)*", "", rest)
            text = "\n".join([begin + head, rule, *rows(), after])
    return text


if __name__ == "__main__":
    for document in dict.fromkeys(name for name, _, _ in TABLES):
        (DOCS / document).write_text(page(document))
