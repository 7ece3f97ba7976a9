"""The whole run as text: what `--dry-run` prints. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scripts.chaos_testing.kubernetes import manifests
from scripts.chaos_testing.kubernetes.faults import Tools
from scripts.chaos_testing.kubernetes.options import Options
from scripts.chaos_testing.kubernetes.standing import OWNER_KINDS
from scripts.chaos_testing.kubernetes.steps import (
    Choose,
    Command,
    Fault,
    Hold,
    Step,
    Until,
    Victim,
    Wait,
)

_STARTS_S = 600.0
_ASKS_S = 1800.0
_FLOWS_S = 300.0
_ENDS_S = 900.0
_GONE_S = 120.0


@dataclass(frozen=True)
class Plan:
    """A run. Each fault is a round of its own, between `begin` and `end`."""

    prepare: tuple[Step, ...]
    begin: tuple[Step, ...]
    strike: Command
    faults: tuple[Fault, ...]
    end: tuple[Step, ...]
    result: Command
    clean_up: tuple[Command, ...]


def plan(tools: Tools, options: Options, faults: Sequence[Fault], files: dict[str, str]) -> Plan:
    """The run for a release.

    Args:
        files: the client's code, by path.
    """
    release, run = tools.release, tools.run
    name = manifests.name_of(release, run)
    pod = manifests.client(
        release, run, options.seed, options.tokens, options.compare, _client_limit_s(options)
    )
    return Plan(
        prepare=(
            tools.kubectl("create", "-f", "-", stdin=manifests.code(release, run, files)),
            tools.kubectl("create", "-f", "-", stdin=pod),
            tools.kubectl(
                "wait",
                "--for=condition=Ready",
                f"pod/{name}",
                f"--timeout={_STARTS_S:.0f}s",
                limit_s=_STARTS_S + 30,
            ),
            Wait(Until.WHOLE, _STARTS_S),
            tools.client("expect"),
            Wait(Until.ASKED, _ASKS_S),
        ),
        begin=(tools.client("begin", str(tools.users)), Wait(Until.FLOWING, _FLOWS_S)),
        strike=tools.client("strike"),
        faults=tuple(faults),
        end=(tools.client("end"), Wait(Until.ENDED, _ENDS_S)),
        result=tools.client("result"),
        clean_up=(
            tools.kubectl(
                "delete",
                "pods,configmaps,networkpolicies",
                "-l",
                f"{manifests.OWN}={run}",
                "--ignore-not-found",
                limit_s=_GONE_S,
            ),
        ),
    )


def _client_limit_s(options: Options) -> int:
    """Faults end in bounded time, so the client need not outlive a day."""
    return 86_400 + round((options.minutes or 0) * 60)


def text(plan: Plan, tools: Tools, left_out: Sequence[str]) -> str:
    """As a shell script, which nobody needs to run: waits are comments."""
    lines = ["# the client"]
    lines += [line for step in plan.prepare for line in _lines(step)]
    for fault in plan.faults:
        lines += ["", f"# {fault.name}: {fault.what}"]
        if fault.choose:
            lines += list(_choosing(fault.choose, tools))
        lines += [line for step in plan.begin for line in _lines(step)]
        lines += _lines(plan.strike)
        for step in (*fault.steps, *fault.undo, *fault.then, *plan.end, plan.result):
            lines += _lines(step)
    lines += ["", "# at the end, and after a failure or Ctrl-C"]
    lines += [line for step in plan.clean_up for line in _lines(step)]
    if left_out:
        lines += ["", *(f"# left out: {sentence}" for sentence in left_out)]
    return "\n".join(lines)


def _lines(step: Step) -> list[str]:
    if isinstance(step, Wait):
        return [f"# until {step.until}; {step.limit_s:.0f} s at most"]
    if isinstance(step, Hold):
        return [f"# for {step.seconds:.0f} s"]
    return [step.text()]


def _choosing(choose: Choose, tools: Tools) -> Iterator[str]:
    for command in reading(tools):
        yield command.text()
    if choose.victim is not Victim.POD:
        for command in reading_nodes(tools, "NODE"):
            yield command.text()
    yield f"# the {choose.component} pods → {choose.victim}"


def reading(tools: Tools) -> tuple[Command, Command]:
    """How the release stands: its pods, then their owners (a pod's owner is older than the pod)."""
    selected = ("get", "pods", "-l", tools.release.selector, "-o", "json")
    return tools.kubectl(*selected), tools.kubectl("get", OWNER_KINDS, "-o", "json")


def reading_nodes(tools: Tools, node: str) -> tuple[Command, Command]:
    """The nodes, and what runs on one of them."""
    on_node = ("--all-namespaces", f"--field-selector=spec.nodeName={node}", "-o", "json")
    return tools.kubectl("get", "nodes", "-o", "json"), tools.kubectl("get", "pods", *on_node)
