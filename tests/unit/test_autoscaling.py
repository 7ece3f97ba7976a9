"""Autoscaling in virtual time: Ray Serve's own autoscaler with our policy and its delays. The
engines are estimates of a 70B model on four H100, and are counted.
"""

from __future__ import annotations

import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve import autoscaling_policy
from ray.serve._private import autoscaling_state
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.version import DeploymentVersion
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import ServeApplicationSchema

from scripts.simulation.engine_model import load_engine
from serve_app.cli import serve_api
from serve_app.cluster.members import Members
from serve_app.contract import EngineReport, IngressLease, WorkerLease
from serve_app.deploy import Worker, _worker_options
from serve_app.policy.order import general_slots
from serve_app.policy.scaling import load, per_engine, replicas_wanted
from serve_app.settings import Settings, load_settings
from serve_app.settings.sections import POLICY
from tests.tables import each

ID = DeploymentID("Worker", "hermes")
RECORD_S, PUSH_S = 6, 10
"""How often Serve asks a replica for its numbers, and how often it sends them to the controller."""
DECIDE_S = 5
"""How often it decides; live: ten times a second."""
LOAD_S = 90
"""From the decision for one more engine until it takes work."""
PRESETS = ("latency", "balanced", "throughput")
PROMPTS = (2_000, 30_000)
ANSWER = 300
ENGINE = load_engine("estimate-4xh100-llama-70b")
KV = ENGINE.num_gpu_blocks * ENGINE.block_size


def settings_of(preset: str | None, **workers: Any) -> Settings:
    """Autoscaling is on, with its defaults."""
    args = {"preset": preset, "workers": {"device": "gpu", "autoscaling": {}, **workers}}
    return load_settings(args, {})


class Fleet:
    """Ray Serve's autoscaler over some engines."""

    def __init__(self, engines: Counted, settings: Settings, clock: SimpleNamespace) -> None:
        self._engines, self._clock = engines, clock
        self._slots = settings.workers.max_running_requests
        config = _worker_options(settings)["autoscaling_config"]
        self._look_back_s = config.look_back_period_s
        self._state = DeploymentAutoscalingState(ID)
        info = DeploymentInfo(DeploymentConfig(autoscaling_config=config), None, 0, "")
        self.target = self._state.register(info, len(engines.members.workers))
        self.changes: list[tuple[float, int]] = []
        """When the target changed, and to what."""
        self._points: dict[str, list[TimeStampedValue]] = {}
        self._loading: list[float] = []

    @property
    def running(self) -> list[ReplicaID]:
        """Those that take work."""
        return [ReplicaID(one.name, ID) for one in self._engines.members.workers]

    def second(self) -> None:
        """One second has passed."""
        now_s = self._clock.time()
        if now_s % RECORD_S == 0:
            members = self._engines.members
            ingresses = members.others(IngressLease("", "session-1"))
            told = load(ingresses, members.engines, self._slots)
            for name, value in told.items():
                points = self._points.setdefault(name, [])
                points.append(TimeStampedValue(now_s, value))
                points[:] = [one for one in points if one.timestamp > now_s - self._look_back_s]
        if now_s % PUSH_S == 0:
            metrics = {name: list(points) for name, points in self._points.items()}
            for replica in self.running:
                report = ReplicaMetricReport(replica, metrics, now_s)
                self._state.record_request_metrics_for_replica(report)
        if self._loading and self._loading[0] <= now_s:
            self._loading.pop(0)
            self._engines.scale(self.target)
        if now_s % DECIDE_S:
            return
        self._state.update_running_replica_ids(self.running)
        target = self._state.get_decision_num_replicas(self.target)
        if target != self.target:
            self.changes.append((now_s, target))
            self.target = target
            if target > len(self.running):
                self._loading.append(now_s + LOAD_S)
            else:
                self._engines.scale(target)


class Counted:
    """Engines that hold as many requests as they have slots and memory for; each request takes 20 s
    on average.
    """

    def __init__(self, slots: int, prompt: int, replicas: int, seed: str) -> None:
        self.tokens = prompt + ANSWER
        self.holds = min(general_slots(slots, slots), math.ceil(0.85 * KV / self.tokens))
        self.rng = random.Random(seed)
        self.waiting = 0
        self._now_s = 0.0
        self._ends: list[float] = []
        self.scale(replicas)

    @property
    def free(self) -> int:
        """How many more would run at once; below 0, so many wait."""
        return self.replicas * self.holds - len(self._ends) - self.waiting

    def arrive(self, requests: int) -> None:
        """More of them."""
        self.waiting += requests
        self._start()

    def scale(self, replicas: int) -> None:
        """So many run from now on; what those do that leave waits."""
        self.replicas = replicas
        while len(self._ends) > replicas * self.holds:
            self._ends.pop()
            self.waiting += 1
        heapify(self._ends)
        self._publish()

    def second(self, now_s: float) -> None:
        """One second has passed."""
        self._now_s = now_s
        while self._ends and self._ends[0] <= now_s:
            heappop(self._ends)
        self._start()

    def _start(self) -> None:
        while self.waiting and len(self._ends) < self.replicas * self.holds:
            self.waiting -= 1
            heappush(self._ends, self._now_s + self.rng.expovariate(1 / 20))
        self._publish()

    def _publish(self) -> None:
        running = len(self._ends)
        lease = IngressLease("ingress-1", "session-1", True, running, self.waiting)
        names = [f"replica-{number}" for number in range(self.replicas)]
        each = running // self.replicas
        self.members = Members(
            (lease,),
            tuple(WorkerLease(name, self.holds) for name in names),
            engines=tuple(EngineReport(name, KV, KV, each * self.tokens, each) for name in names),
        )


@contextmanager
def rays_clock(now: Callable[[], float]) -> Iterator[SimpleNamespace]:
    """Ray Serve's autoscaler lives in virtual time."""
    clock = SimpleNamespace(time=now, monotonic=now)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoscaling_state, "time", clock)
        patch.setattr(autoscaling_policy, "time", clock)
        yield clock


def lived(
    settings: Settings,
    prompt: int,
    arrivals: Callable[[int, Counted], int],
    until_s: int,
    replicas: int = 2,
    seed: str = "1",
) -> tuple[Fleet, Counted]:
    """Args:
    arrivals: how many requests come in this second.
    """
    now_s = 0
    engines = Counted(settings.workers.max_running_requests, prompt, replicas, seed)
    with rays_clock(lambda: float(now_s)) as clock:
        fleet = Fleet(engines, settings, clock)
        for now_s in range(1, until_s + 1):
            engines.second(now_s)
            engines.arrive(arrivals(now_s, engines))
            fleet.second()
    return fleet, engines


def one_engine(settings: Settings, prompt: int) -> float:
    """What it is to have: the target, its slots, or what its memory holds."""
    workers = settings.workers
    assert workers.autoscaling is not None
    slots = general_slots(workers.max_running_requests, workers.max_running_requests)
    return min(workers.autoscaling.target_ongoing_requests, slots, 0.85 * KV / (prompt + ANSWER))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_queue_that_does_not_empty_grows_the_fleet_and_an_empty_one_shrinks_it(
    preset: str, prompt: int
) -> None:
    def three_wait(second: int, engines: Counted) -> int:
        return max(0, engines.free + 3) if second < 1_800 else 0

    fleet, _ = lived(settings_of(preset), prompt, three_wait, 2_400)
    (first_s, _), *_ = fleet.changes
    assert 30 <= first_s <= 30 + PUSH_S + RECORD_S
    grown = [change for change in fleet.changes if change[0] < 1_800]
    assert [target for _, target in grown] == sorted(target for _, target in grown)
    assert grown[-1][1] == 8
    shrunk = fleet.changes[len(grown) :]
    # What has run ends within a minute or two, and nothing happens before.
    assert 120 <= shrunk[0][0] - 1_800 <= 120 + PUSH_S + RECORD_S + 120
    assert shrunk[-1][1] == 2


@each("preset", PRESETS)
@each("prompt", PROMPTS)
def test_a_long_queue_starts_all_engines_at_once(preset: str, prompt: int) -> None:
    fleet, _ = lived(settings_of(preset), prompt, lambda s, _: 20_000 if s == 1 else 0, 60)
    assert [target for _, target in fleet.changes] == [8]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_steady_load_does_not_flap(preset: str, prompt: int) -> None:
    """Poisson arrivals for an hour. With the long prompts, a dozen requests fill one engine."""
    settings = settings_of(preset)
    changes = []
    for engines in (2.5, 4.2, 6.8):
        rng = random.Random(f"{preset} {prompt} {engines}")
        mean = engines * one_engine(settings, prompt) / 20

        def poisson(_: int, __: Counted, rng: random.Random = rng, mean: float = mean) -> int:
            limit, count, product = math.exp(-mean), 0, rng.random()
            while product > limit:
                count, product = count + 1, product * rng.random()
            return count

        fleet, _ = lived(settings, prompt, poisson, 4_200, math.ceil(engines))
        changes.append(len([1 for at_s, _ in fleet.changes if at_s > 600]))
    print(f"{preset}, {prompt} tokens: {changes} changes in an hour")
    assert max(changes) <= 3


# -- the policy -----------------------------------------------------------------------------------


def wanted(told: dict[str, dict[str, list[float]]], target: int, running: int) -> float:
    """What the policy makes of the numbers of each replica, in the order of their times."""
    raw = {
        name: {
            replica: [TimeStampedValue(at_s, value) for at_s, value in enumerate(values)]
            for replica, values in of_each.items()
        }
        for name, of_each in told.items()
    }
    context = SimpleNamespace(
        raw_metrics=raw,
        target_num_replicas=target,
        current_num_replicas=running,
        config=_worker_options(settings_of(None))["autoscaling_config"],
    )
    return replicas_wanted(context)[0]


def numbers(sequences: float, waiting: float = 0, held: float = 112) -> dict[str, Any]:
    return {
        "sequences": {"a": [sequences]},
        "waiting": {"a": [waiting]},
        "sequences_per_engine": {"a": [held]},
    }


@each(
    "told, target, running, expected",
    [
        (numbers(200, 184, held=14), 1, 1, 200 / 14),  # the queue of the issue that led here
        (numbers(100), 2, 2, 5),
        (numbers(15, 1, held=14), 1, 1, 2),  # whatever waits calls for one more
        (numbers(15, 1, held=14), 8, 1, 2.5),
        (numbers(61), 4, 4, 61 / 20 * 1.25),  # three replicas would do, and nearly be too few
        (numbers(79), 4, 4, 4),
        (numbers(0), 4, 4, 0),
        ({}, 5, 3, 5),  # no worker can reach Redis
        ({"sequences": {"a": []}}, 5, 3, 5),
        ({"ray_serve_running_requests": {"a": [50]}}, 5, 3, 5),
    ],
)
def test_so_many_replicas_are_wanted(
    told: dict[str, Any], target: int, running: int, expected: float
) -> None:
    assert wanted(told, target, running) == pytest.approx(expected)


def test_the_newest_numbers_count() -> None:
    """One replica hangs and has told nothing for a while."""
    told = numbers(0)
    for name, value in (("sequences", 160), ("waiting", 0), ("sequences_per_engine", 112)):
        told[name] = {"hangs": [0], "lives": [0, 0, value]}
    assert wanted(told, 2, 2) == 8


def test_serves_controller_needs_none_of_our_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no runtime environment (`scripts/deploy` carries the code to the replicas)."""
    policy = _worker_options(settings_of(None))["autoscaling_config"].policy
    for name in [name for name in sys.modules if name.split(".")[0] == "serve_app"]:
        monkeypatch.setitem(sys.modules, name, None)
    loaded = pickle.loads(policy.get_serialized_policy_def())
    assert loaded is not replicas_wanted
    assert loaded(SimpleNamespace(raw_metrics={}, target_num_replicas=3)) == (3, {})


# -- a Serve config -------------------------------------------------------------------------------


def versions(application: dict[str, Any]) -> tuple[str, DeploymentVersion]:
    """By which Serve decides whether it builds the application again, and replaces its workers."""
    schema = ServeApplicationSchema.model_validate(application)
    code = get_app_code_version(schema)
    (worker,) = schema.model_dump(exclude_unset=True)["deployments"]
    config = AutoscalingConfig(**worker["autoscaling_config"])
    return code, DeploymentVersion(code, DeploymentConfig(autoscaling_config=config), {})


def application_with(**workers: Any) -> dict[str, Any]:
    """As quickstart hands it to Serve."""
    args = {"preset": "balanced", "workers": {"autoscaling": {}, **workers}}
    application = {"name": "hermes", "import_path": "serve_app.deploy:build", "args": args}
    serve_api.with_scaling(application)
    return application


OTHERS = {
    "max_replicas": 12,
    "target_ongoing_requests": 5,
    "upscale_delay_s": 60,
    "downscale_delay_s": 300,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
@each("name", OTHERS)
def test_another_number_of_the_autoscaling_replaces_no_engine(name: str) -> None:
    other = {name: OTHERS[name]}
    before, after = application_with(), application_with(autoscaling=other)
    assert before != after
    assert versions(before) == versions(after)
    assert versions(application_with(max_running_requests=9)) != versions(after)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_serve_takes_the_numbers_and_the_policy() -> None:
    """As its controller does, with what it has built of the `args`."""
    application = application_with(autoscaling={"max_replicas": 5})
    deployment: Any = Worker  # Serve's decorator has made it one
    worker = deployment.options(**_worker_options(load_settings(application["args"], {})))
    built = {"Worker": DeploymentInfo(worker._deployment_config, worker._replica_config, 0, "")}
    policies = {"Worker": AutoscalingPolicy(policy_function=POLICY).get_serialized_policy_def()}
    schema = ServeApplicationSchema.model_validate(application)
    taken = override_deployment_info(built, schema, policies)["Worker"].deployment_config
    assert taken.num_replicas is None
    assert taken.autoscaling_config.max_replicas == 5
    assert taken.autoscaling_config.policy.get_policy().__name__ == "replicas_wanted"
    assert taken.max_ongoing_requests == worker._deployment_config.max_ongoing_requests


def test_an_application_keeps_what_it_says_of_its_workers_itself() -> None:
    for args, deployments in (
        ({"workers": {"autoscaling": {}}}, [{"name": "Worker", "num_replicas": 3}]),
        ({"workers": {"replicas": 3}}, []),
        ({}, []),
    ):
        application: dict[str, Any] = {"args": args, "deployments": deployments}
        serve_api.with_scaling(application)
        assert application == {"args": args, "deployments": deployments}


# -- what a worker tells ---------------------------------------------------------------------------


def test_the_load_is_what_runs_and_what_waits() -> None:
    """Every ingress counts the same unclaimed requests."""
    ingresses = (
        IngressLease("a", "c", running=10, waiting=4, unclaimed=100),
        IngressLease("b", "c", running=7, waiting=0, unclaimed=98),
    )
    assert load(ingresses, (), 16) == {
        "sequences": 121,
        "waiting": 104,
        "sequences_per_engine": 14,
    }
    assert load((), (), 16)["sequences"] == 0


def engine(used: float, running: int, kv_tokens: int = 1_000) -> EngineReport:
    return EngineReport("e", kv_tokens, 4_096, int(used * kv_tokens), running)


@each(
    "engines, expected",
    [
        ([], 112),
        ([engine(0.5, 10)], 17),
        ([engine(1.0, 13), engine(0.0, 0), engine(0.0, 0)], 0.85 * 13),  # idle ones say nothing
        ([engine(0.2, 4), engine(0.4, 2)], 0.85 * 6 / 0.6),
        ([engine(0.1, 100)], 112),
        ([engine(0.9, 1)], 1),
        ([engine(0.0, 200, kv_tokens=0)], 112),  # an encoder
    ],
)
def test_an_engine_holds_what_its_slots_and_its_memory_allow(
    engines: list[EngineReport], expected: float
) -> None:
    assert per_engine(engines, 128) == pytest.approx(expected)
