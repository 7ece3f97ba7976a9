"""`scripts/chaos`: start a service, put load on it, kill its processes at random, count, and stop
what was started.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from scripts.chaos_testing import failover
from scripts.chaos_testing.account import Account, Strike, settle, table
from scripts.chaos_testing.journals import Watchdog, differences
from scripts.chaos_testing.parts import FAULTS, LASTING, REAL, SIMULATED, Parts, choose
from scripts.chaos_testing.traffic import PROMPTS, Client, End, Told, Unfit, look_up
from serve_app.local import logs, ports, processes, redis_server, service, surroundings
from serve_app.local.environment import ROOT

LENGTHS = {"simulated": (20, 110, 200, 300), "vllm": (16, 50, 85, 120)}
"""Tokens of the responses, by engine."""
_LOOK_UPS = 32
_KEPT_LOGS = ROOT / ".hermes" / "chaos-logs"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Run mixed traffic on a real service (Ray Serve, Redis, HAProxy) while its "
        "processes are killed at random. Prints the outcome of the requests; exits "
        "with 1 if one was lost, duplicated or corrupted. `scripts/chaos failover` kills the "
        "primary of three Redis with Sentinel: see scripts/chaos failover --help.",
    )
    add = parser.add_argument
    add("--minutes", type=float, help="how long to inject faults (3)")
    add("--engine", choices=tuple(LENGTHS), default="simulated", help="`simulated` needs no model")
    add("--seed", type=int, default=0, help="seed of traffic and faults (0)")
    add("--users", type=int, help="concurrent users (24; vllm: 6)")
    add("--every-s", type=float, help="mean time between faults (7; vllm: 20; with --strikes: 3)")
    add("--faults", help=f"only these faults, separated by commas: {', '.join(FAULTS)}")
    add("--apart", action="store_true", help="each fault only when the service is whole again")
    add(
        "--strikes",
        type=int,
        metavar="N",
        help="like --apart, and stop after N faults, each with streams in flight; --minutes (5 "
        "per fault) is the limit",
    )
    options = parser.parse_args(arguments)
    real = options.engine == "vllm"
    options.users = options.users or (6 if real else 24)
    options.every_s = options.every_s or (3.0 if options.strikes else 20.0 if real else 7.0)
    options.apart = options.apart or bool(options.strikes)
    options.minutes = options.minutes or (5.0 * options.strikes if options.strikes else 3.0)
    options.names = options.faults.split(",") if options.faults else REAL if real else SIMULATED
    if unknown := set(options.names) - set(FAULTS):
        parser.error(f"no such fault: {', '.join(unknown)}")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    health = {"health_check_period_s": 2.0, "health_check_timeout_s": 5.0}
    args: dict[str, Any] = {
        "workers": {"max_running_requests": 64, **health},
        "ingress": {"heartbeat_s": 2.0, "disconnect_grace_s": 10.0},
        # Every request is read again at the end.
        "journal": {"retention_s": 60.0 * options.minutes + 600},
    }
    if options.engine == "simulated":
        args["engine"] = {"kind": "simulated", "args": {"tokens_per_s": 50, "prefill_ms": 20}}
        args["workers"]["replicas"] = 3
    return args


async def keep_busy(
    client: Client, chance: random.Random, lengths: Sequence[int], end: End, all_told: list[Told]
) -> None:
    """One user, who sends request after request until the run ends."""
    while not end.over:
        told = Told(chance.choice(PROMPTS), chance.choice(lengths), chance.random() < 0.75)
        all_told.append(told)
        await client.ask(told)


async def strike_on(
    parts: Parts, options: argparse.Namespace, end: End, all_told: list[Told], strikes: list[Strike]
) -> None:
    """Inject one fault after another; faults that last overlap with the next ones."""
    chance = random.Random(options.seed + 1)
    stopped: set[int] = set()
    lasting: set[asyncio.Task[None]] = set()

    async def strike(name: str, pid: int) -> None:
        in_flight = sum(told.accepted and not told.done for told in all_told)
        strikes.append(one := Strike(name, time.monotonic(), in_flight=in_flight))
        when = f"{one.at_s - began_s:7.1f} s"
        print(f"{when}  {name:<22} pid {pid}, {in_flight} streams in flight", flush=True)
        stopped.add(pid)
        one.from_s = await FAULTS[name].strike(parts, pid)
        stopped.discard(pid)

    began_s = time.monotonic()
    while time.monotonic() < end.at_s - 5 and len(strikes) != options.strikes:
        await asyncio.sleep(chance.uniform(0.6, 1.4) * options.every_s)
        if options.apart:
            await asyncio.gather(*lasting)
            await asyncio.to_thread(parts.until_whole)
        if options.strikes and not any(told.arrivals_s and not told.done for told in all_told):
            continue  # without a stream in flight the pause cannot be measured
        struck = [s.name for s in strikes]
        names = sorted(options.names, key=lambda name: (struck.count(name), chance.random()))
        if any(not task.done() for task in lasting):
            names = [name for name in names if name not in LASTING]
        found = await asyncio.to_thread(choose, parts, names, stopped, chance)
        if found is not None:
            lasting.add(task := asyncio.create_task(strike(*found)))
            await asyncio.wait({task}, timeout=0.1)
    await asyncio.gather(*lasting)
    if len(strikes) == options.strikes:
        end.at_s = min(end.at_s, time.monotonic())


async def disorder(
    options: argparse.Namespace, running: service.Service
) -> tuple[Account, list[Strike], list[Told]]:
    """The run.

    Raises:
        Unfit: a stream was not whole before any fault.
    """
    all_told: list[Told] = []
    strikes: list[Strike] = []
    parts, lengths = Parts(running), LENGTHS[options.engine]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=running.url, timeout=httpx.Timeout(8, pool=None), limits=limits
    ) as http:
        client = Client(http, running.model)
        texts = await client.texts(lengths, at_once=True)
        end = End(time.monotonic() + options.minutes * 60)
        users = [
            keep_busy(client, random.Random(options.seed * 1000 + n), lengths, end, all_told)
            for n in range(options.users)
        ]
        watchdog = Watchdog(parts.operator(), running.model)
        watching = asyncio.create_task(watchdog.watch())
        await asyncio.gather(*users, strike_on(parts, options, end, all_told, strikes))
        watching.cancel()
        # httpx's pool takes time quadratic in its waiting requests.
        gate = asyncio.Semaphore(_LOOK_UPS)
        await asyncio.gather(*(look_up(http, told, gate) for told in all_told if told.request_id))
    account = settle(all_told, lambda told: texts[told.prompt, told.tokens])
    account.stood_still = [f"{name}: {problem}" for name, problem in watchdog.findings.items()]
    account.longest_still_s = watchdog.longest_s
    account.misbooked = await differences(parts.operator(), all_told)
    return account, strikes, all_told


def start(state: Path, options: argparse.Namespace) -> service.Service:
    """Start the service, a cable between it and Redis, and a separate clock for each of its
    processes.
    """
    redis = redis_server.start(state / "redis")
    cable_port = ports.free_port()
    cable = ROOT / "scripts" / "chaos_testing" / "cable.py"
    command = [sys.executable, str(cable), str(cable_port), str(redis.port)]
    pids = {
        "redis": redis.pid,
        "cable": processes.start(command, state / "cable.log", os.environ, state),
    }
    (state / "clocks").mkdir()
    environment = {
        "HERMES_CHAOS_CLOCKS": str(state / "clocks"),
        "PYTHONPATH": str(ROOT / "scripts" / "chaos_testing" / "clocks"),
    }
    try:
        running = service.start(
            state,
            ROOT / "cluster" / "local_cpu.yaml",
            ports.free_port(),
            settings(options),
            redis_url=redis.url().replace(f":{redis.port}/", f":{cable_port}/"),
            environment=environment,
            tell=lambda line: print(f"  {line}"),
            kept_logs=_KEPT_LOGS,
        )
    except BaseException:
        for pid in pids.values():
            processes.end(pid)
        raise
    running.pids.update(pids)
    running.save()
    return running


def main() -> int:
    # Ending this command by a signal also stops everything that it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.argv[1:2] == ["failover"]:
        return failover.main(sys.argv[2:])
    options = parse(sys.argv[1:])
    surroundings.leave()
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        running = None
        try:
            running = start(Path(folder), options)
            account, strikes, all_told = asyncio.run(disorder(options, running))
            if not account.clean:
                print(f"logs: {logs.keep(Path(running.state_dir), _KEPT_LOGS)}")
        except (RuntimeError, Unfit) as error:
            print(f"  ✗ {error}", file=sys.stderr)
            return 2
        finally:
            if running is not None:
                running.down()
    print(table(account, strikes, all_told))
    return 0 if account.clean else 1


if __name__ == "__main__":
    sys.exit(main())
