"""`scripts/chaos --kubernetes`: reads, refuses or plans, performs, prints, and cleans up."""

from __future__ import annotations

import json
import random
import secrets
import sys
import time
from collections.abc import Iterator

from scripts.chaos_testing.kubernetes import interrupts, manifests, options, release, report, rights
from scripts.chaos_testing.kubernetes.cluster import Cluster, CommandFailed
from scripts.chaos_testing.kubernetes.executor import Executor, NeverHappened
from scripts.chaos_testing.kubernetes.faults import Tools, faults
from scripts.chaos_testing.kubernetes.plan import Plan, plan, text
from scripts.chaos_testing.kubernetes.release import Refused
from scripts.chaos_testing.kubernetes.steps import Fault
from scripts.local.environment import ROOT

_PROBLEMS = (Refused, CommandFailed, NeverHappened)


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit status."""
    with interrupts.ending_as_ctrl_c():
        return _run(options.parse(arguments))


def _run(chosen: options.Options) -> int:
    cluster = Cluster(chosen.context, chosen.namespace)
    try:
        found = release.read(cluster, chosen)
        _check(cluster, found, chosen)
    except _PROBLEMS as problem:
        return _refuse(problem)
    run = "RUN" if chosen.dry_run else secrets.token_hex(3)
    tools = Tools(cluster, found, run, chosen.users, chosen.chart)
    possible, left_out = faults(tools, chosen.faults)
    files = {path: (ROOT / path).read_text() for path in manifests.CODE}
    planned = plan(tools, chosen, possible, files)
    executor = Executor(
        tools, planned, random.Random(chosen.seed), chosen.allow_shared_nodes, _tell
    )
    try:
        executor.standing()
    except _PROBLEMS as problem:
        return _refuse(problem)
    if chosen.dry_run:
        print(text(planned, tools, left_out))
        return 0
    return _perform(executor, planned, tools, chosen, left_out)


def _check(cluster: Cluster, found: release.Release, chosen: options.Options) -> None:
    """Before anything is created: rights, and what an earlier run has left or another one uses."""
    if lacking := rights.lacking(cluster, found.namespace, chosen.faults):
        said = ", ".join(f"{verb} {resource}" for verb, resource in lacking)
        raise Refused(f"this user may not: {said} (namespace {found.namespace})")
    kinds = "pods,configmaps,networkpolicies"
    argv = (*cluster.kubectl, "get", kinds, "-l", manifests.OWN, "-o", "name")
    if there := cluster.run(argv).split():
        raise Refused(
            f"another run is in progress or has left {', '.join(there)}; if none is: kubectl "
            f"--namespace {found.namespace} delete {kinds} -l {manifests.OWN}"
        )


def _perform(
    executor: Executor,
    planned: Plan,
    tools: Tools,
    chosen: options.Options,
    left_out: list[str],
) -> int:
    rows: list[report.Row] = []
    status = 0
    try:
        executor.prepare()
        for fault in _rounds(planned, chosen):
            row = executor.round(fault)
            rows += [row] if row else []
            if row and row.problem:
                _tell(f"stopped: {row.problem}")
                break
    except _PROBLEMS as problem:
        status = _refuse(problem)
    except KeyboardInterrupt:
        _tell("interrupted")
        status = 130
    finally:
        status = _cleaned(executor) or status
    left_out = [*left_out, *dict.fromkeys(executor.left_out)]
    print(report.table(rows, left_out, executor.compared_with))
    if chosen.json:
        found = report.as_json(tools.release, rows, left_out, executor.compared_with)
        chosen.json.write_text(json.dumps(found, indent=2))
    return status or int(not all(row.clean for row in rows))


def _rounds(planned: Plan, chosen: options.Options) -> Iterator[Fault]:
    """Each fault once; then, with `--minutes`, at random."""
    until_s = time.monotonic() + (chosen.minutes or 0) * 60
    yield from planned.faults
    chance = random.Random(chosen.seed + 1)
    while planned.faults and time.monotonic() < until_s:
        yield chance.choice(planned.faults)


def _cleaned(executor: Executor) -> int:
    """Remove what was created; nobody can interrupt it."""
    with interrupts.ignored():
        _tell("removing what this run created")
        try:
            executor.clean_up()
        except CommandFailed as failed:
            return _refuse(failed)
    return 0


def _refuse(problem: Exception) -> int:
    print(f"  ✗ {problem}", file=sys.stderr)
    return 2


def _tell(line: str) -> None:
    print(f"  {time.strftime('%H:%M:%S')}  {line}", flush=True)
