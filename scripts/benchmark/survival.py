"""What survives: the account of every stream that was in flight when a process that makes tokens
was killed, and how long it takes until the system answers again. The systems take turns.
"""

import asyncio
import math
import os
import signal
import time
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import uvloop

from scripts.chaos_testing.account import Strike, pause_s

from . import measurement, report
from .batchers import Batcher, Job, alike
from .compare import WARM_UP_USERS, wanted_loads
from .measurement import maker_for, take_turns, wanted_chars, warm_up
from .processes import apart, read_processes
from .report import Column
from .run import Exchange, HttpEndpoint, Load, RequestMaker, Run, SystemFailed, fetch
from .systems import System

_MAKERS = ("engine core", "worker replica", "ingress replica")
"""The kinds of process that make tokens: of a system, the first kind that it has."""
_WHOLE_WITHIN_S = 300.0
_RETRY_S = 0.2
_PROBE_TOKENS = 2
_FATES = ("whole", "lost", "cut", "doubled", "wrong")


@dataclass
class Row:
    """One kill. The fates are those of the streams in flight; `refused` counts the failures among
    the requests that came after the kill and before the end of the run.
    """

    name: str
    load: str
    round: int
    in_flight: int
    whole: int
    lost: int
    cut: int
    doubled: int
    wrong: int
    pause_s: float
    """The longest pause around the kill of a stream that survived; NaN if none did."""
    again_s: float
    """From the kill to the first whole answer to a request sent after it."""
    refused: int
    tokens_per_s: float
    """Without a kill, as the next."""
    cpu_per_token_us: float
    error_kinds: dict[str, int]


COLUMNS = (
    Column("in flight", lambda row: row.in_flight),
    Column("whole", lambda row: row.whole, spread=True),
    Column("lost", lambda row: row.lost),
    Column("cut", lambda row: row.cut),
    Column("doubled", lambda row: row.doubled),
    Column("wrong", lambda row: row.wrong),
    Column("pause s", lambda row: row.pause_s, ",.1f", spread=True),
    Column("again s", lambda row: row.again_s, ",.1f", spread=True),
    Column("refused", lambda row: row.refused),
    Column("tok/s", lambda row: row.tokens_per_s, spread=True),
    Column("µs/tok", lambda row: row.cpu_per_token_us),
)
_LEGEND = """\
pause: the longest of a survivor; again: from the kill to the answer to a new request;
refused: failures of requests after the kill; tok/s, µs/tok: of a run without a kill just before"""


def measure_survival(
    options: Namespace, arguments: Sequence[str], systems: Sequence[System]
) -> int:
    """Measure, print and write; the command's exit status."""
    chars, loads = wanted_chars(options, systems[0]), wanted_loads(options)
    for system in systems:
        warm_up(options, system, chars, max(load.users for load in loads) or WARM_UP_USERS)
    at_first = {system.name: len(_makers_of_tokens(system, systems)) for system in systems}
    print(report.heading(COLUMNS), flush=True)

    def run(system: System, load: Load, number: int) -> Row:
        seed = zlib.crc32(f"{load.seed}/{load.users}".encode())
        makers = [maker_for(options, system, chars, seed + part) for part in range(3)]

        def loaded(maker: RequestMaker) -> Run:
            return Run(Batcher(None), HttpEndpoint(maker), load, alike(options.max_tokens))

        async def before() -> measurement.Row:
            return await measurement.measure(number, loaded(makers[0]), system)

        async def killed() -> tuple[list[Exchange], Strike, float]:
            one = loaded(makers[1])
            return await _kill_halfway(one, victims, options.duration_s, makers[2])

        undisturbed = uvloop.run(before())
        victims = _until_whole(system, systems, at_first[system.name])
        all_sent, strike, again_s = uvloop.run(killed())
        _until_whole(system, systems, at_first[system.name])
        in_flight = [one for one in all_sent if _in_flight(one, strike.at_s)]
        expected = uvloop.run(_texts_again(makers[2], in_flight))
        fates = [fate(one, text) for one, text in zip(in_flight, expected, strict=True)]
        whole = [one for one, its in zip(in_flight, fates, strict=True) if its == "whole"]
        pause = pause_s(strike, whole)
        late = [one for one in all_sent if one.job.arrived_s >= strike.at_s and one.error]
        errors = Counter(one.error for one in all_sent if one.error)
        return Row(
            name=system.name,
            load=load.name,
            round=number,
            in_flight=len(in_flight),
            **{name: fates.count(name) for name in _FATES},
            pause_s=math.nan if pause is None else round(pause, 3),
            again_s=round(again_s, 3),
            refused=len(late),
            tokens_per_s=undisturbed.tokens_per_s,
            cpu_per_token_us=undisturbed.cpu_per_token_us,
            error_kinds=dict(errors.most_common(5)),
        )

    rows = take_turns(COLUMNS, loads, options.rounds, systems, run)
    print(f"{_LEGEND}\n\n{report.summary(COLUMNS, rows)}")
    report.write_document(options, ["scripts/bench", *arguments], rows=rows)
    return 1 if any(row.whole < row.in_flight or row.refused for row in rows) else 0


def fate(one: Exchange, expected: str) -> str:
    """What became of a stream.

    Args:
        expected: the text of its prompt without a kill.
    """
    text, tokens, wanted = "".join(one.texts), one.tokens, one.job.output_tokens
    if not one.ended.is_set() or (one.error and not one.closed):
        return "lost"
    if tokens > wanted or len(text) > len(expected):
        return "doubled"
    if one.error or tokens < wanted:
        return "cut"
    return "whole" if text == expected else "wrong"


def _in_flight(one: Exchange, at_s: float) -> bool:
    ended_s = one.finished_s if one.ended.is_set() else None
    return one.job.arrived_s < at_s and (ended_s is None or ended_s > at_s)


async def _kill_halfway(
    run: Run, victims: Sequence[psutil.Process], duration_s: float, maker: RequestMaker
) -> tuple[list[Exchange], Strike, float]:
    """`kill -9` in the middle of a run the one of these that has worked most in it, for only that
    surely has streams. Returns what was sent, the kill, and after how many seconds a new request
    was answered.
    """
    before_s = {victim: _cpu_s(victim) for victim in victims}
    async with asyncio.TaskGroup() as group:
        running = group.create_task(run.measure())
        await asyncio.sleep(duration_s / 2)
        busiest = max(victims, key=lambda victim: _cpu_s(victim) - before_s[victim])
        os.kill(busiest.pid, signal.SIGKILL)
        strike = Strike("kill", time.perf_counter())
        again_s = await _answers_again(maker) - strike.at_s
    return (await running).exchanges, strike, again_s


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _answers_again(maker: RequestMaker) -> float:
    """When a new request has had its answer (`time.perf_counter`); the next is sent when one has
    failed.
    """
    endpoint, deadline_s = HttpEndpoint(maker), time.perf_counter() + _WHOLE_WITHIN_S
    try:
        while time.perf_counter() < deadline_s:
            probe = Exchange(Job(0, 0.0, 0, _PROBE_TOKENS, interactive=False))
            await endpoint.answer(probe)
            if probe.error is None:
                return time.perf_counter()
            await asyncio.sleep(_RETRY_S)
    finally:
        await endpoint.close()
    raise SystemFailed(f"{maker.url} does not answer after a kill: {probe.error}")


async def _texts_again(maker: RequestMaker, those: Sequence[Exchange]) -> list[str]:
    """The texts that the same requests get now."""
    endpoint = HttpEndpoint(maker)
    asked = [Exchange(one.job, one.request) for one in those]
    try:
        await asyncio.gather(*map(endpoint.answer, asked))
    finally:
        await endpoint.close()
    if errors := [one.error for one in asked if one.error]:
        raise SystemFailed(f"{maker.url} does not answer after a kill: {errors[0]}")
    return ["".join(one.texts) for one in asked]


def _makers_of_tokens(system: System, systems: Sequence[System]) -> list[psutil.Process]:
    """The processes of a system that make tokens."""
    table = read_processes()
    others = [one.marks for one in systems if one is not system]
    mine, _ = apart(table, system.marks, others)
    maker = next((kind for kind in _MAKERS if any(table[one].kind == kind for one in mine)), None)
    return [one for one in table if one in mine and table[one].kind == maker]


def _until_whole(system: System, systems: Sequence[System], count: int) -> list[psutil.Process]:
    """The processes of a system that make tokens, once they are as many as at first.

    Raises:
        SystemFailed: they do not come back.
    """
    deadline_s = time.monotonic() + _WHOLE_WITHIN_S
    while time.monotonic() < deadline_s:
        makers = _makers_of_tokens(system, systems)
        answering = all(fetch(f"{url}/models") for url in (system.url, *system.behind))
        if len(makers) == count and answering:
            return makers
        time.sleep(0.5)  # a replica tells nobody outside that it is ready
    raise SystemFailed(f"{system.name} has not come back after a kill")
