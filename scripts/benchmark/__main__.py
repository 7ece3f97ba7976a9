"""`scripts/bench`: start what is asked for, measure, and end what was started."""

import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from .batching import compare_batchers
from .beside_batch import measure_beside_batch
from .compare import compare
from .idle import measure_idle
from .lateness import measure_lateness
from .long_among_short import measure_long_among_short
from .options import parse
from .run import SystemFailed
from .survival import measure_survival
from .systems import PEERS, System, existing, start_own


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status: 0, 1 when a request failed, 2 when a system did not
    start.
    """
    options = parse(arguments)
    # An event loop takes Ctrl-C for the end of its task; a shell's background jobs would ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with ExitStack() as stack:
        # Short, because sockets live below it.
        folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        try:
            there = Path(stack.enter_context(folder))
            if options.lateness:
                return measure_lateness(options)
            systems = _start(options, there, stack)
            if options.idle:
                return measure_idle(options, arguments, systems)
            if options.batching:
                return compare_batchers(options, arguments, systems)
            if options.kill:
                return measure_survival(options, arguments, systems)
            if options.long_among_short:
                return measure_long_among_short(options, arguments, systems[0])
            if options.beside_batch:
                return measure_beside_batch(options, arguments, systems[0])
            return compare(options, arguments, systems)
        except SystemFailed as failed:
            print(failed, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            # A second one must not interrupt the ending, which takes seconds and no more.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            print("\ninterrupted: stopping everything that was started", file=sys.stderr)
            return 130


def _start(options: Namespace, folder: Path, stack: ExitStack) -> list[System]:
    starts = [existing] if options.url else [start_own] if options.serve else []
    systems: list[System] = []
    for start in (*starts, *(PEERS[name] for name in options.against)):
        systems.append(system := start(options, folder, stack))
        print(f"{system.name} serves {system.model} on {system.url}", file=sys.stderr)
    return systems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
