"""Performs a plan: strikes, waits, undoes, and removes what it created, whatever happens."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from scripts.chaos_testing.kubernetes import interrupts, nodes
from scripts.chaos_testing.kubernetes.cluster import CommandFailed
from scripts.chaos_testing.kubernetes.faults import Tools, engines_under_load
from scripts.chaos_testing.kubernetes.manifests import OWN
from scripts.chaos_testing.kubernetes.plan import Plan, reading, reading_nodes
from scripts.chaos_testing.kubernetes.release import NotPossible, Refused
from scripts.chaos_testing.kubernetes.report import Row
from scripts.chaos_testing.kubernetes.standing import Standing, standing
from scripts.chaos_testing.kubernetes.steps import Choose, Command, Fault, Hold, Step, Until, Victim
from scripts.local.service import is_whole

LOOK_S = 1.0
"""Between two looks at what `kubectl wait` cannot express."""
FLOWS_ON_S = 5.0
"""How long streams flow after a fault is over, so that late damage shows."""


class NeverHappened(Exception):
    """A wait was too long; what was still missing."""


class Executor:
    """One run.

    Args:
        shared: whether a node may be drained that runs others' pods.
    """

    def __init__(
        self,
        tools: Tools,
        plan: Plan,
        chance: random.Random,
        shared: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._tools = tools
        self._plan = plan
        self._chance = chance
        self._shared = shared
        self._tell = tell
        self._active = ""
        """The Ray cluster that served when the service was last whole."""
        self.compared_with = ""
        self.left_out: list[str] = []

    def standing(self) -> Standing:
        """How the release stands now; refuses if its labels match others' pods."""
        pods, owners = (self._read(command)["items"] for command in reading(self._tools))
        return standing(self._tools.release, owners, pods)

    def prepare(self) -> None:
        """Start the client, and ask for the texts before any fault."""
        for step in self._plan.prepare:
            self._perform(step, {})

    def round(self, fault: Fault) -> Row | None:
        """One fault under streams; None if it turns out not to be possible."""
        problem = ""
        try:
            victim = self._chosen(fault.choose) if fault.choose else {}
            for step in self._plan.begin:
                self._perform(step, {})
            self._strike(fault, victim)
        except NotPossible as reason:
            self.left_out.append(f"{fault.name}: {reason}")
            self._tell(f"left out: {self.left_out[-1]}")
            return None
        except (CommandFailed, NeverHappened) as failed:
            problem = str(failed)
        self._pause(FLOWS_ON_S)
        for step in self._plan.end:
            try:
                self._perform(step, {})
            except NeverHappened as never:  # the result counts what has not ended as lost
                problem = problem or str(never)
        return Row(fault.name, fault.what, json.loads(self._run(self._plan.result, {})), problem)

    def clean_up(self) -> None:
        """Remove everything that bears the run's label."""
        for command in self._plan.clean_up:
            self._run(command, {})

    def _strike(self, fault: Fault, victim: dict[str, str]) -> None:
        self._tell(f"{fault.name}: {fault.what} {' '.join(victim.values())}".rstrip())
        self._run(self._plan.strike, {})
        try:
            for step in fault.steps:
                self._perform(step, victim)
        finally:
            with interrupts.deferred():
                self._undo(fault.undo, victim)
        for step in fault.then:
            self._perform(step, {})

    def _undo(self, commands: Sequence[Command], victim: dict[str, str]) -> None:
        """Every command of it, though one fails."""
        failures = []
        for command in commands:
            try:
                self._run(command, victim)
            except CommandFailed as failed:
                failures.append(str(failed))
        if failures:
            raise CommandFailed(f"not undone: {'; '.join(failures)}")

    def _chosen(self, choose: Choose) -> dict[str, str]:
        now = self.standing()
        if choose.victim is Victim.POD:
            ready = now.ready_pods(choose.component)
            if not ready:
                raise NotPossible(f"no {choose.component} pod is ready")
            return dict(nodes.variables(self._chance.choice(ready)))
        every, _ = reading_nodes(self._tools, "")
        listed = self._read(every)["items"]
        names = nodes.candidates(choose, now, listed, self._client_node())
        found = []
        for name in names:
            _, there = reading_nodes(self._tools, name)
            pods = self._read(there)["items"]
            found.append(nodes.node(self._tools.release, name, pods))
        node, said = nodes.choice(choose, found, self._shared, self._chance)
        if said:
            self._tell(said)
        return dict(nodes.variables(nodes.pod_on(now, choose.component, node.name)))

    def _client_node(self) -> str:
        command = self._tools.kubectl("get", "pods", "-l", f"{OWN}={self._tools.run}", "-o", "json")
        (client,) = self._read(command)["items"]
        return str(client["spec"]["nodeName"])

    def _perform(self, step: Step, victim: dict[str, str]) -> None:
        if isinstance(step, Command):
            self._run(step, victim)
        elif isinstance(step, Hold):
            self._pause(step.seconds)
        else:
            self._wait(step.until, step.limit_s)

    def _wait(self, until: Until, limit_s: float) -> None:
        """Look until a condition holds. A look that fails is repeated: a fault may be the cause."""
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                missing = self._missing(until)
            except CommandFailed as failed:
                missing = str(failed)
            if not missing:
                return
            if time.monotonic() > deadline_s:
                raise NeverHappened(f"after {limit_s:.0f} s: {missing}")
            self._pause(LOOK_S)

    def _missing(self, until: Until) -> str:
        if until in (Until.ASKED, Until.FLOWING, Until.ENDED):
            return self._missing_of_client(until)
        if until is Until.GROWN:
            return self._missing_engines()
        now = self.standing()
        if until is Until.SWITCHED:
            same = now.active in ("", self._active)
            return f"the Ray cluster {self._active} still serves" if same else ""
        if until is Until.SHRUNK:
            pods, least = len(now.ready_pods("engine")), now.wanted["engine"]
            return f"{pods} engine pods, not {least}" if pods > least else ""
        missing = now.missing
        if not missing and not is_whole(ready := self._client_state()["ready"]):
            missing = f"/readyz says {json.dumps(ready)}"
        if not missing:
            self._active = now.active
        return missing

    def _missing_engines(self) -> str:
        scaling = self._tools.release.autoscaling
        assert scaling is not None
        counted = self._client_state()["ready"].get("workers", 0)
        needed = engines_under_load(scaling)
        return f"{counted} of {needed} engines are ready" if counted < needed else ""

    def _missing_of_client(self, until: Until) -> str:
        state = self._client_state()
        if state["problem"]:
            raise Refused(state["problem"])
        if until is Until.ASKED:
            self.compared_with = state["compared_with"]
            return "" if self.compared_with else "texts are still being asked for"
        if until is Until.FLOWING:
            begun, users = state["begun"], state["users"]
            return "" if begun >= users else f"{begun} of {users} streams have begun to flow"
        return f"{state['running']} streams still run" if state["running"] else ""

    def _client_state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._run(self._tools.client("state"), {}))
        return state

    def _run(self, command: Command, victim: dict[str, str]) -> str:
        try:
            return self._tools.cluster.run(command.at(victim), command.input, command.limit_s)
        except CommandFailed as failed:
            if failed.status is not None and failed.status in command.ends:
                return ""
            if failed.status is not None and failed.status in command.cannot:
                raise NotPossible(str(failed)) from None
            raise

    def _read(self, command: Command) -> Any:
        return json.loads(self._run(command, {}))

    def _pause(self, seconds: float) -> None:
        threading.Event().wait(seconds)
