"""`scripts/demo` and `hermes-serve demo`: an agent's turn streams while everything dies.

Starts a private service with two engines and asks for one strict call of a tool with sixty
arguments. While its JSON streams, it kills the engine that writes it (`kill -9`), then the ingress
that holds the connection, then Redis, and then deploys another version of the code, which replaces
every ingress, worker and engine. Exits with 1 if a byte differs from an undisturbed run, if
anything was booked twice or not at all, or if a process was not replaced. The client is OpenAI's
own SDK, with one line that makes it reconnect. Stops what it started, and nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hermes-serve demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="a folder or a hub id (default: the tiny model)")
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="what the engines run on"
    )
    parser.add_argument(
        "--against", choices=("vllm",), help="show the same kill beside a bare vLLM server"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=30.0,
        help="how long the answer would take undisturbed (default %(default)g)",
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write an asciicast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    return parser.parse_args(words)
