"""Runs the demo: starts what it needs, asks, kills, compares, and says what it found."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

import workers
from serve_app import __version__
from serve_app.client import ReconnectingTransport
from serve_app.demo import faults, peer, turn
from serve_app.demo.arguments import arguments
from serve_app.demo.screen import Pane, Screen
from serve_app.local import __main__ as quickstart
from serve_app.local import preflight, processes, ray_cluster, service, surroundings
from serve_app.local.environment import CLUSTER, HOME
from serve_app.local.ports import free_port

_MAX_MODEL_LEN = 8192
_SETTINGS = (
    f"engine.args.max_model_len={_MAX_MODEL_LEN}",
    "ingress.graceful_shutdown_timeout_s=2",  # streams move on instead of keeping an ingress
)
_PROBE_LETTERS, _FEWEST_LETTERS, _MOST_LETTERS = 4, 40, 100
"""Of one text. The service refuses the grammar of longer ones, which takes too long to compile."""
_BETWEEN, _AFTER = 100, 300
"""Pieces of the answer: before a fault, and after it, so that its pause is among them."""
_READY_WITHIN_S = 300.0
_RECOMPUTED = re.compile(r"^hermes_recomputed_tokens_total(?:\{.*\})? (\S+)$", re.MULTILINE)
_BOOKED = ("num_model_requests", "output_tokens")


class Demo:
    """One run on one service."""

    def __init__(
        self, running: service.Service, screen: Screen, seconds: float, against: peer.Peer | None
    ) -> None:
        self._service, self._screen = running, screen
        self._seconds, self._against = seconds, against
        self._http = httpx.Client(base_url=running.url, transport=ReconnectingTransport())
        self._victims = faults.Victims(running)
        self.struck: list[dict[str, Any]] = []
        self.recomputed = 0
        """Tokens of prompt and answer that engines have computed again because others ended."""

    def _turn(self, body: dict[str, Any], url: str = "", **client: Any) -> turn.Turn:
        http: Any = httpx.Client(**client, timeout=120)
        sdk = OpenAI(base_url=f"{url or self._service.url}/v1", api_key="none", http_client=http)
        return turn.Turn(sdk, body)

    def undisturbed(self) -> tuple[dict[str, Any], turn.Turn]:
        """The body whose answer takes about as long as wanted, and that answer. It is long enough
        for every fault, however slow the machine.
        """
        short = turn.request(self._service.model, _PROBE_LETTERS)
        probe = self._turn(short)
        probe.read()
        if not probe.is_whole:
            return short, probe  # no longer one would be
        wanted = self._seconds * probe.pieces / probe.lasted_s
        letters = _PROBE_LETTERS + int((wanted - probe.pieces) / turn.TEXTS)
        bounded = min(max(letters, _FEWEST_LETTERS), _MOST_LETTERS)
        body = turn.request(self._service.model, bounded)
        answer = self._turn(body)
        answer.read()
        return body, answer

    def disturbed(self, body: dict[str, Any], upgrade: faults.Upgrade) -> turn.Turn:
        """The same answer, while everything dies under it."""
        answer = self._turn(body, transport=ReconnectingTransport())
        panes = 2 if self._against else 1
        ours = self._screen.pane(f"hermes-serve: {turn.TOOL}(…)", panes)
        reading = [threading.Thread(target=answer.read, args=(ours.add,))]
        if self._against:
            theirs = self._screen.pane("vllm serve: the same call", panes)
            lost = self._turn(body, self._against.url)
            reading.append(threading.Thread(target=self._watch, args=(lost, theirs)))
        for thread in reading:
            thread.start()
        try:
            self._strike_all(answer, ours, upgrade)
        except turn.Ended:
            raise RuntimeError(f"the answer ended too early. {answer.failure}") from None
        finally:
            for thread in reading:
                thread.join()
        return answer

    def _watch(self, lost: turn.Turn, pane: Pane) -> None:
        lost.read(pane.add)
        pane.mark(f"{lost.failure}: the turn is lost" if lost.failure else "whole")

    def _strike_all(self, answer: turn.Turn, pane: Pane, upgrade: faults.Upgrade) -> None:
        kills = (self._victims.kill_engine, self._victims.kill_ingress, self._victims.kill_redis)
        answer.wait_for_more(_BETWEEN)
        for kill in kills:
            state = self._http.get(f"/v1/requests/{answer.request_id}").json()
            if self._against and kill is kills[0]:
                self._against.kill_engine()
            pause_s = self._strike(answer, pane, f"kill -9  {kill(state)}")
            self._screen.went_on(f"continued after {pause_s:.1f} s")
            answer.wait_for_more(_BETWEEN)
        self._note_recomputed()  # the counters go with their processes
        self._strike(answer, pane, f"serve deploy  {upgrade.begin()}")
        self._screen.went_on("…")
        if not processes.until(upgrade.is_done, _READY_WITHIN_S):
            raise RuntimeError("the new version does not serve, or old processes still run")
        over = ", after the answer's end" if answer.has_ended else ""
        self._screen.went_on(f"all replaced at {answer.since_first_s():.1f} s{over}")
        self._note_recomputed()

    def _strike(self, answer: turn.Turn, pane: Pane, what: str) -> float:
        """Note what was done just now. Returns the longest pause that followed."""
        at_s = answer.since_first_s()
        pane.mark(what.partition("  ")[0])
        self._screen.fault(at_s, what)
        self.struck.append(fault := {"at_s": round(at_s, 1), "what": what})
        fault["pause_s"] = round(pause_s := answer.wait_for_more(_AFTER), 2)
        return pause_s

    def booked(self) -> dict[str, int]:
        """What the ledger has for this service: requests and output tokens."""
        times: Any = {"start_time": int(time.time()) - 7200, "bucket_width": "1h"}
        page = self._http.get("/v1/usage", params=times).json()
        rows = [row for bucket in page["data"] for row in bucket["results"]]
        return {name: sum(row[name] for row in rows) for name in _BOOKED}

    def _note_recomputed(self) -> None:
        page = self._http.get("/metrics").text
        self.recomputed += int(sum(map(float, _RECOMPUTED.findall(page))))


def findings(
    plain: turn.Turn,
    answer: turn.Turn,
    booked: Mapping[str, int],
    recomputed: int,
    upgrade: faults.Upgrade,
) -> list[tuple[str, bool]]:
    """Each promise in words, and whether it was kept."""
    differ = sum(a != b for a, b in zip_longest(plain.arguments, answer.arguments))
    once = {"num_model_requests": 1, "output_tokens": plain.tokens}
    return [
        (answer.failure or f"ended by itself after {answer.lasted_s:.1f} s", not answer.failure),
        (
            f"{abs(plain.tokens - answer.tokens)} of {plain.tokens:,} tokens lost; "
            f"{recomputed:,} computed again, as a prefill",
            plain.tokens == answer.tokens,
        ),
        (
            f"valid JSON, {turn.FIELDS} arguments, {differ} bytes differ from the undisturbed call",
            answer.is_whole and not differ,
        ),
        (f"sha256 {answer.sha256[:16]}…, undisturbed {plain.sha256[:16]}…", not differ),
        (f"booked exactly once: {booked['output_tokens']:,} tokens", booked == once),
        (
            f"every process replaced, by pids {faults.listed(upgrade.running())}",
            not upgrade.before & upgrade.running(),
        ),
        (f"version {upgrade.version} answers", upgrade.serves()),
    ]


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    surroundings.leave()
    quickstart.end_on_signals()
    try:
        with ExitStack() as stack:
            return run(options, stack)
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        print(f"  ✗ {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace, stack: ExitStack) -> int:
    """Start what is needed, run it, and say what was found."""
    screen = Screen(record=options.record is not None)
    running = start(options, screen, stack)
    source = options.model or str(Path(workers.__file__).with_name("tiny_model"))
    against = None
    if options.against:
        screen.tell("vLLM's own server: starting")
        against = peer.start(source, running.model, options.device, _MAX_MODEL_LEN, stack)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    upgrade = faults.Upgrade(running, faults.Victims(running), folder)
    demo = Demo(running, screen, options.seconds, against)
    screen.tell("the call once undisturbed, to compare with")
    body, plain = demo.undisturbed()
    if plain.failure or not plain.is_whole:
        raise RuntimeError(f"the model does not call the tool: {plain.failure or plain.arguments}")
    before = demo.booked()
    with screen:
        answer = demo.disturbed(body, upgrade)
        booked = {name: count - before[name] for name, count in demo.booked().items()}
        found = findings(plain, answer, booked, demo.recomputed, upgrade)
        for words, kept in found:
            screen.finding(words, kept)
    kept = all(kept for _, kept in found)
    if screen.recording:
        screen.recording.save(options.record, f"hermes-serve {__version__}")
    if options.json:
        told = {
            "version": __version__,
            "seconds": round(answer.lasted_s, 1),
            "faults": demo.struck,
            "replaced_by": sorted(upgrade.running()),
            "sha256": {"undisturbed": plain.sha256, "disturbed": answer.sha256},
            "findings": dict(found),
        }
        options.json.write_text(f"{json.dumps(told, indent=2)}\n")
    return 0 if kept else 1


def start(options: argparse.Namespace, screen: Screen, stack: ExitStack) -> service.Service:
    """A private service with two engines, in a folder of its own."""
    words = [f"--device={options.device}", *(f"--set={setting}" for setting in _SETTINGS)]
    words += [f"--model={options.model}"] if options.model else []
    wanted = quickstart.arguments(words)
    gpus = preflight.gpus() if options.device == "gpu" else 0
    given = quickstart.changes(wanted, options.device, gpus)
    state_dir = HOME / ".hermes" / "demo"
    if problem := preflight.take(state_dir):
        raise RuntimeError(problem)
    ray_cluster.use_token(state_dir / "ray-token")
    running = service.start(
        state_dir,
        CLUSTER / "local_cpu.yaml",
        free_port(),
        given,
        tell=screen.tell,
        place=ray_cluster.Place(cpus=ray_cluster.LOGICAL_CPUS + 2 * gpus, gpus=gpus),
    )
    stack.callback(running.down)
    return running


if __name__ == "__main__":
    sys.exit(main())
