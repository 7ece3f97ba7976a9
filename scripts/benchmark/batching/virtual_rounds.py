"""The batchers in virtual time, as `BatchRounds` measures them on an engine."""

from collections.abc import Callable
from dataclasses import replace

from scripts.simulation.engines import load_engine

from ..options import Options
from .rounds import pressures
from .row import BatchRow
from .run import Pressure
from .specification import Specification, parse
from .virtual_run import VirtualRun


class VirtualRounds:
    """Every round has a seed of its own, and that is all in which two rounds differ."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._parameters = load_engine(options.virtual)
        self.capacity_per_s = 0.0
        """See `BatchRounds`."""

    def take_turns(self, report: Callable[[BatchRow], None]) -> list[BatchRow]:
        """See `BatchRounds`."""
        options, rows = self._options, list[BatchRow]()
        if options.load_percent:
            (continuous,) = parse("continuous")
            (load,) = pressures(replace(options, concurrency=(max(options.concurrency),)))
            self.capacity_per_s = self._measure(continuous, load, 0).requests_per_s
        for pressure in pressures(options, self.capacity_per_s):
            for number in range(1, options.rounds + 1):
                for specification in options.batching:
                    rows.append(self._measure(specification, pressure, number))
                    report(rows[-1])
        return rows

    def _measure(self, specification: Specification, pressure: Pressure, number: int) -> BatchRow:
        seeded = replace(pressure, seed=f"{pressure.seed}/{number}")
        prompt_tokens, max_tokens = self._options.prompt_tokens, self._options.max_tokens
        run = VirtualRun(specification, self._parameters, seeded, prompt_tokens, max_tokens)
        return run.measure(number)
