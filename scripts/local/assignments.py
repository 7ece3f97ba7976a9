"""Settings on a command line: `order.claim_ahead=2`. Standard library only."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any


def assignment(text: str) -> tuple[tuple[str, ...], object]:
    """The setting's name in parts, and its value: JSON, or else the text itself.

    Raises:
        argparse.ArgumentTypeError: it has not the form NAME=VALUE.
    """
    name, equals, value = text.partition("=")
    names = tuple(name.split("."))
    if not equals or not all(part.isidentifier() for part in names):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE, such as engine.kind=vllm")
    try:
        return names, json.loads(value)
    except ValueError:
        return names, value


def assign(settings: dict[str, Any], names: Sequence[str], value: object) -> None:
    """Set one value in nested `settings`; sections that are missing are made."""
    section = settings
    for name in names[:-1]:
        section = section.setdefault(name, {})
    section[names[-1]] = value
