"""The faults, each as the commands that a person would type. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.chaos_testing.kubernetes import manifests
from scripts.chaos_testing.kubernetes.cluster import Cluster
from scripts.chaos_testing.kubernetes.options import NAMES
from scripts.chaos_testing.kubernetes.release import Release
from scripts.chaos_testing.kubernetes.standing import COMPONENT
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
from serve_app.settings.workers import AutoscalingSettings

_WHOLE = Wait(Until.WHOLE, 1800)
"""Long enough to load a model."""
CUT_S = 30.0
_DRAIN_S = 900
_HELM_S = 300.0
_STARTS_S = 3600.0
"""How long a second Ray cluster may take: nodes may have to come, and models to be loaded."""
_MORE_ENGINES = 2

KILL_REDIS = """\
pids=$(pidof redis-server) # a child that rewrites the append-only file, too
case " $pids " in *" 1 "*)
    echo "redis-server is process 1 of its container, which nothing in the container can kill" >&2
    exit 3 ;;
esac
kill -9 $pids
"""
_STILL_REACHES = """\
import socket, sys, time
for _ in range(10):
    try:
        socket.create_connection((sys.argv[1], 8000), 3).close()
    except OSError:
        sys.exit(0)
    time.sleep(1)
print("the pod still connects: the network plugin does not enforce policies", file=sys.stderr)
sys.exit(3)
"""


@dataclass(frozen=True)
class Tools:
    """What a fault's commands consist of. `run`: the run's name; `users`: streams at a time."""

    cluster: Cluster
    release: Release
    run: str
    users: int
    chart: Path

    def kubectl(self, *words: str, **rest: object) -> Command:
        """A command of kubectl."""
        return Command((*self.cluster.kubectl, *words), **rest)  # type: ignore[arg-type]

    def helm(self, *words: str) -> Command:
        """A command of helm."""
        return Command((*self.cluster.helm, *words), limit_s=_HELM_S)

    def client(self, *words: str) -> Command:
        """A command to the client pod."""
        name = manifests.name_of(self.release, self.run)
        return self.kubectl("exec", name, "--", "python", "-m", manifests.MODULE, *words)


def faults(tools: Tools, names: tuple[str, ...]) -> tuple[list[Fault], list[str]]:
    """The faults that are possible with this release, and a sentence for each that is not."""
    found: list[Fault] = []
    left_out: list[str] = []
    for name in names:
        if problem := _impossible(tools, name):
            left_out.append(f"{name}: {problem}")
        else:
            found.append(_FAULTS[name](tools))
    return found, left_out


def _impossible(tools: Tools, name: str) -> str:
    release = tools.release
    if name.startswith("redis") and not release.has_redis:
        return "Redis is not the release's own (redis.external)"
    if name == "scale":
        scaling = release.autoscaling
        if scaling is None:
            return "without settings.workers.autoscaling, engines come and go by upgrades only"
        if scaling.min_replicas == scaling.max_replicas:
            return "min_replicas and max_replicas of settings.workers.autoscaling are the same"
    if name == "upgrade":
        if release.values["upgrade"]["type"] != "NewCluster":
            return "upgrade.type is not NewCluster, so an upgrade starts no second cluster"
        here = chart_version(tools.chart)
        if here != release.chart:
            return f"the release is of {release.chart}, and {tools.chart} is {here}: see --chart"
    return ""


def chart_version(chart: Path) -> str:
    """Name and version of a chart, as `helm list` shows them."""
    lines = (chart / "Chart.yaml").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if line[:1].isalpha() and ":" in line)
    return f"{fields['name'].strip()}-{fields['version'].strip().strip(chr(34))}"


def _delete(component: str, what: str) -> Callable[[Tools], Fault]:
    def fault(tools: Tools) -> Fault:
        words = ("--force", "--grace-period=0", "--wait=false")
        name = "redis-pod" if component == "redis" else component
        return Fault(
            name,
            f"{what} deleted with --force",
            Choose(Victim.POD, component),
            (tools.kubectl("delete", "pod", "$POD", *words),),
            (),
            (_WHOLE,),
        )

    return fault


def _kill_redis(tools: Tools) -> Fault:
    words = ("exec", "$POD", "-c", "redis", "--", "sh", "-c", KILL_REDIS)
    return Fault(
        "redis-kill",
        "Redis killed with kill -9",
        Choose(Victim.POD, "redis"),
        # 137: the container ended with Redis, and the command with the container.
        (tools.kubectl(*words, ends=(137,), cannot=(3,)),),
        (),
        (_WHOLE,),
    )


def _drain(tools: Tools) -> Fault:
    words = ("--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={_DRAIN_S}s")
    selector = f"--pod-selector={tools.release.selector}"
    return Fault(
        "drain",
        "node with an engine drained",
        Choose(Victim.DRAINED, "engine"),
        (tools.kubectl("drain", "$NODE", *words, selector, limit_s=_DRAIN_S + 60.0),),
        (tools.kubectl("uncordon", "$NODE"),),
        (_WHOLE,),
    )


def _cut(tools: Tools) -> Fault:
    """NetworkPolicies only add up: one that denies takes nothing away from those that allow. The
    pods therefore lose the label by which the chart's policies allow them anything, too.
    """
    policy = manifests.cut_policy(tools.release, tools.run)
    labels: list[Command] = []
    undo: list[Command] = []
    for component in ("ingress", "engine"):
        mine = f"{tools.release.selector},{COMPONENT}={component}"
        cut = f"{tools.release.selector},{manifests.CUT}={component}"
        on_node = "--field-selector=spec.nodeName=$NODE"
        words = (f"{manifests.CUT}={component}", f"{COMPONENT}=cut", "--overwrite")
        labels.append(tools.kubectl("label", "pods", "-l", mine, on_node, *words))
        back = (f"{COMPONENT}={component}", f"{manifests.CUT}-", "--overwrite")
        undo.append(tools.kubectl("label", "pods", "-l", cut, *back))
    name = policy["metadata"]["name"]
    undo.append(tools.kubectl("delete", "networkpolicy", name, "--ignore-not-found"))
    reaches = ("python", "-c", _STILL_REACHES, f"{tools.release.name}-serve-svc")
    steps: tuple[Step, ...] = (
        tools.kubectl("create", "-f", "-", stdin=policy),
        *labels,
        tools.kubectl("exec", "$POD", "-c", "ray-worker", "--", *reaches, cannot=(3,)),
        Hold(CUT_S),
    )
    choose = Choose(Victim.CUT, "engine")
    return Fault(
        "cut", f"an engine's node cut off for {CUT_S:.0f} s", choose, steps, tuple(undo), (_WHOLE,)
    )


def engines_under_load(scaling: AutoscalingSettings) -> int:
    """How many engines the load of the fault `scale` needs."""
    return min(scaling.min_replicas + _MORE_ENGINES, scaling.max_replicas)


def _scale(tools: Tools) -> Fault:
    scaling = tools.release.autoscaling
    assert scaling is not None
    engines = engines_under_load(scaling)
    users = max(tools.users, round(scaling.target_ongoing_requests * engines))
    idle_s = float(tools.release.values["autoscaler"]["idleTimeoutSeconds"])
    slow_s = scaling.upscale_delay_s + _STARTS_S
    return Fault(
        "scale",
        f"{users} streams: engines {scaling.min_replicas} → {engines} → {scaling.min_replicas}",
        None,
        (
            tools.client("users", str(users)),
            Wait(Until.GROWN, slow_s),
        ),
        (tools.client("users", str(tools.users)),),
        (Wait(Until.SHRUNK, scaling.downscale_delay_s + idle_s + 900), _WHOLE),
    )


def _upgrade(tools: Tools) -> Fault:
    """An annotation of the pods changes nothing but that KubeRay starts a second cluster."""
    release = tools.release
    keep_s = float(release.values["upgrade"]["keepOldClusterSeconds"])
    value = f"podAnnotations.hermes-serve/chaos={tools.run}"
    switched = Wait(Until.SWITCHED, _STARTS_S)
    alone = Wait(Until.WHOLE, keep_s + 1800)
    chart = str(tools.chart)
    return Fault(
        "upgrade",
        "another annotation: second cluster, and back",
        None,
        (
            tools.helm("upgrade", release.name, chart, "--reuse-values", "--set-string", value),
            switched,
            alone,
        ),
        (tools.helm("rollback", release.name, release.revision),),
        (switched, alone),
    )


_FAULTS: dict[str, Callable[[Tools], Fault]] = {
    "engine": _delete("engine", "engine pod"),
    "ingress": _delete("ingress", "ingress pod"),
    "head": _delete("head", "head pod"),
    "redis-pod": _delete("redis", "Redis's pod"),
    "redis-kill": _kill_redis,
    "drain": _drain,
    "cut": _cut,
    "scale": _scale,
    "upgrade": _upgrade,
}
assert tuple(_FAULTS) == NAMES
