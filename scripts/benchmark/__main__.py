"""`scripts/bench`: start what is asked for, measure, and end what was started."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from . import interrupts
from .batching import compare_batchers
from .compare import compare
from .errors import SystemFailed
from .micro import measure_micro
from .options import Options, parse
from .order import measure_order
from .systems import (
    System,
    existing,
    start_bare_vllm,
    start_own,
    start_ray_direct,
    start_ray_serve_llm,
)

_PEERS = {
    "bare-vllm": start_bare_vllm,
    "ray-serve-llm": start_ray_serve_llm,
    "ray-direct": start_ray_direct,
}


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status: 0, 1 when a request failed, 2 when a system did not
    start.
    """
    options = parse(arguments)
    interrupts.install()
    with ExitStack() as stack:
        # Short, because sockets live below it.
        folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        try:
            there = Path(stack.enter_context(folder))
            if options.micro:
                return measure_micro(options, there)
            systems = _start(options, there, stack)
            if options.batching:
                return compare_batchers(options, arguments, systems[0] if systems else None)
            if options.order:
                return measure_order(options, arguments, systems[0])
            return compare(options, arguments, systems)
        except SystemFailed as failed:
            print(failed, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\ninterrupted: stopping everything that was started", file=sys.stderr)
            return 130


def _start(options: Options, folder: Path, stack: ExitStack) -> list[System]:
    starts: list[Callable[[Options, Path], System]] = []
    if options.url:
        starts.append(lambda options, _: existing(options))
    if options.serve:
        starts.append(start_own)
    starts.extend(_PEERS[name] for name in options.against)
    systems: list[System] = []
    for start in starts:
        system = start(options, folder)
        stack.callback(system.end)
        systems.append(system)
        print(f"{system.name} serves {system.model} on {system.url}", file=sys.stderr)
    return systems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
