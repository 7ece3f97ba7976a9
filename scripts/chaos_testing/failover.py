"""`scripts/chaos failover`: kill the primary of three Redis with Sentinel under streams, again and
again, and count what the new primary lacked and what the workers' writers restored.

Without Ray: a writer and a subscription in this process (`streams`), on Redis and Sentinels as
`helm/redis-ha.yaml` configures them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from scripts.chaos_testing.streams import Load, Stream, load
from scripts.local import ports, processes, surroundings
from scripts.local.environment import ROOT
from scripts.local.sentinels import Sentinels
from serve_app.settings import Settings

_EVENTS_PER_S = 50.0


class Case(NamedTuple):
    """One row of the table."""

    delay_ms: int
    """How late replicas get what the primary has accepted."""
    min_replicas: int
    """`min-replicas-to-write`."""


class Failover(NamedTuple):
    """One kill."""

    pause_s: float
    entries: int
    """How many entries of running requests Redis had accepted."""
    lacked: int
    """How many of them the new primary did not have when the old one was gone."""
    missing: int
    """How many of them it did not have when every stream went on."""


class Outcome(NamedTuple):
    """One case after all its kills."""

    case: Case
    failovers: list[Failover]
    streams: int
    whole: int
    accepted: int
    """Requests that were accepted and had no worker yet."""
    forgotten: int
    """How many of them are gone."""

    @property
    def lost_nothing(self) -> bool:
        """Whether every stream is whole."""
        return self.whole == self.streams and not any(one.missing for one in self.failovers)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos failover", description=__doc__)
    parser.add_argument("--strikes", type=int, default=5, help="kills in each case (5)")
    parser.add_argument("--streams", type=int, default=16, help="streams (16)")
    parser.add_argument(
        "--delays-ms", default="0", help="how late replicas get their data, with commas (0)"
    )
    parser.add_argument(
        "--min-replicas", default="1", help="values of min-replicas-to-write, with commas (1)"
    )
    options = parser.parse_args(arguments)
    options.cases = [
        Case(delay_ms, count)
        for delay_ms in map(int, options.delays_ms.split(","))
        for count in map(int, options.min_replicas.split(","))
    ]
    return options


@contextmanager
def group(folder: Path, case: Case) -> Iterator[Sentinels]:
    """Redis and Sentinels, with late replicas if the case wants them."""
    cables: dict[int, int] = {}

    def announced(port: int) -> int:
        if case.delay_ms and port not in cables:
            cables[port] = ports.free_port()
            command = [sys.executable, "-m", "scripts.chaos_testing.cable", "--delay-s"]
            command += [str(case.delay_ms / 1000), str(cables[port]), str(port)]
            started.append(processes.start(command, folder / "cable.log", os.environ, ROOT))
        return cables.get(port, port)

    started: list[int] = []
    settings = {"min-replicas-to-write": case.min_replicas}
    try:
        sentinels = Sentinels(folder / "redis", settings=settings, announced=announced)
        try:
            yield sentinels
        finally:
            sentinels.stop()
    finally:
        for pid in started:
            processes.end(pid)


async def strike(sentinels: Sentinels, running: Load) -> Failover:
    """Kill the primary, and wait until every stream goes on."""
    await running.until_all_go_on()
    await asyncio.sleep(random.uniform(0.2, 1.2))  # anywhere between two entries
    primary = await asyncio.to_thread(sentinels.all_back)
    killed_s = time.monotonic()
    sentinels.kill(primary)
    await asyncio.to_thread(sentinels.replicas_are_cut_off, primary)
    accepted = {stream.key: stream.accepted for stream in running.streams}
    had = {
        port: await asyncio.to_thread(_ids, sentinels, port, running.streams)
        for port in sentinels.ports_of
        if port != primary
    }
    successor = await asyncio.to_thread(sentinels.until_failed_over, primary)
    await running.until_all_go_on()
    has = await asyncio.to_thread(_ids, sentinels, successor, running.streams)
    return Failover(
        max(stream.pause_s(killed_s) for stream in running.streams),
        sum(map(len, accepted.values())),
        sum(len(ids - had[successor][key]) for key, ids in accepted.items()),
        sum(len(ids - has[key]) for key, ids in accepted.items()),
    )


def _ids(sentinels: Sentinels, port: int, streams: list[Stream]) -> dict[str, set[str]]:
    """The ids of the entries that a server has of each stream."""
    with sentinels.server(port) as server, server.pipeline(transaction=False) as pipeline:
        for stream in streams:
            pipeline.xrange(stream.key)
        found = pipeline.execute()
    return {s.key: {i for i, _ in entries} for s, entries in zip(streams, found, strict=True)}


async def measure(folder: Path, case: Case, options: argparse.Namespace) -> Outcome:
    failovers = []
    with group(folder, case) as sentinels:
        settings = Settings.model_validate({"redis": {"url": sentinels.url}})
        async with load(settings, options.streams, _EVENTS_PER_S) as running:
            for _ in range(options.strikes):
                failovers.append(one := await strike(sentinels, running))
                print(f"  {case} {one}", flush=True)
            await running.finish()
            whole = sum(stream.whole for stream in running.streams)
            ended = len(running.streams), whole, len(running.waiting), await running.forgotten()
    return Outcome(case, failovers, *ended)


def table(outcomes: list[Outcome]) -> str:
    """The table that the terminal shows at the end, in the form of the documents."""
    lines = [
        "| replicas late by | `min-replicas-to-write` | pause p50 / max, s | entries the new "
        "primary lacked, per kill | still lacked later | streams whole | waiting requests "
        "forgotten |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        pauses_s = [one.pause_s for one in outcome.failovers]
        lacked = [one.lacked for one in outcome.failovers]
        lines.append(
            f"| {outcome.case.delay_ms} ms | {outcome.case.min_replicas} "
            f"| {statistics.median(pauses_s):.1f} / {max(pauses_s):.1f} "
            f"| {min(lacked)} to {max(lacked)} | {sum(one.missing for one in outcome.failovers)} "
            f"| {outcome.whole} of {outcome.streams} "
            f"| {outcome.forgotten} of {outcome.accepted} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    surroundings.leave()
    logging.getLogger("hermes").addHandler(logging.NullHandler())  # the table tells enough
    outcomes = []
    for case in options.cases:
        with tempfile.TemporaryDirectory(prefix="failover-") as folder:
            outcomes.append(asyncio.run(measure(Path(folder), case, options)))
    print(table(outcomes))
    return 0 if all(outcome.lost_nothing for outcome in outcomes) else 1
