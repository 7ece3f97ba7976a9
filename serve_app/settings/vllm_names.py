"""Which of vLLM's arguments and variables mean something here, and why the others do not.

Only vLLM's engine and its request handlers run in a worker: no HTTP server, no launcher, and no
second machine. The chart asks here through helm/hermes-serve/files/settings.json.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("vllm.json")
VLLM: Mapping[str, Any] = json.loads(DATA.read_text())
"""What the pinned vLLM's server takes, written by `python -m scripts.vllm_schema`: the `arguments`
of its parser; the fields of its `requests`, with their JSON Schemas; and by path, the fields of
OpenAI's that it does not know (`without_effect`).
"""

_DATA = tomllib.loads(DATA.with_name("vllm_arguments.toml").read_text())


def _reasons(kind: str) -> dict[str, str]:
    groups = _DATA["refused"]
    return {name: group["why"] for group in groups for name in group.get(kind, "").split()}


WITHOUT_MEANING: Mapping[str, str] = {
    **{name: f"is set by {own}: remove it and set {own}" for name, own in _DATA["owned"].items()},
    **_reasons("arguments"),
}
"""The rest of a sentence that begins with the argument, for each argument to refuse."""
WITH_MEANING = frozenset(VLLM["arguments"]) - WITHOUT_MEANING.keys()
HARMFUL_VARIABLES = _reasons("variables")
"""Variables of the environment that promise keys nobody would ask for, or servers that an engine
would wait for.
"""
VARIABLES = {**HARMFUL_VARIABLES, **_reasons("chart_variables")}
"""What the chart's `env`, too, takes none of. A machine's own environment may have the others."""

TEMPLATE = r"^/|[{}\n]|^template_\w+\.jinja$"
"""A file by its full path, the text itself as vLLM tells it from a file, or a file of vLLM's."""
NO_TEMPLATE = "takes the full path of a file, or the text of the template itself"


def argument_problem(name: str, value: Any = None) -> str:
    """What is wrong with setting an argument of vLLM, as the rest of a sentence that begins with
    it; empty if nothing is.
    """
    plain = name.replace("-", "_")
    if plain in WITHOUT_MEANING:
        return WITHOUT_MEANING[plain]
    if plain not in WITH_MEANING:
        near = difflib.get_close_matches(plain, sorted(WITH_MEANING), 1)
        return "is no argument of vLLM: " + (f"did you mean '{near[0]}'?" if near else "remove it")
    if value is None:
        return ""
    if plain in ("data_parallel_size", "data_parallel_size_local") and str(value) != "1":
        return WITHOUT_MEANING["data_parallel_rank"]
    if plain == "gpu_memory_utilization" and not _is_share(value):
        return "takes a share above 0 and up to 1: 90 % is 0.9"
    if plain == "chat_template" and not (isinstance(value, str) and re.search(TEMPLATE, value)):
        return NO_TEMPLATE
    return ""


def _is_share(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and 0 < float(value) <= 1
    except (TypeError, ValueError):
        return False


def variables_problem(names: Iterable[str]) -> str:
    """The sentence about the first variable that must not be set; empty if there is none."""
    wrong = next((name for name in names if name in HARMFUL_VARIABLES), "")
    return wrong and f"the variable {wrong} {HARMFUL_VARIABLES[wrong]}"
