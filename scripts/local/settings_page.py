"""Writes docs/settings.md from the settings tree; a test compares the two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from serve_app.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

_HEAD = """# Settings

The `args` of the application in a Serve config file. An unknown key, a wrong unit or an impossible combination refuses
to deploy with one line that names the key and the fix. `HERMES_REDIS_URL` in the environment of the Ray nodes takes the
place of `redis.url`, so that a password stands in no file.

| key | default | |
|---|---|---|
"""

_TAIL = """
`engine.args` takes every argument of vLLM's own server by its name (`max_model_len`, `gpu_memory_utilization`,
`enable_prefix_caching`, `tool_call_parser`, …), checked by vLLM's own parser before anything is started.
`workers.autoscaling` is off unless it is given; the defaults shown are for when it is.

This page is written by `.venv/bin/python -m scripts.local.settings_page`.
"""


def _rows(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        child = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if child is not None:
            yield from _rows(child, f"{prefix}{name}.")
        else:
            default = field.get_default(call_default_factory=True)
            shown = "" if default is None else f"`{default}`" if default != "" else ""
            yield f"| `{prefix}{name}` | {shown} | {field.description or ''} |"


def page() -> str:
    """The page as it should be."""
    return _HEAD + "\n".join(_rows(Settings, "")) + "\n" + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
