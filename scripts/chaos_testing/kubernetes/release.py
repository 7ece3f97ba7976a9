"""What helm knows about the release: its values, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.chaos_testing.kubernetes.cluster import Cluster
from scripts.chaos_testing.kubernetes.options import Options
from serve_app.settings.ingress import IngressSettings
from serve_app.settings.workers import AutoscalingSettings

PART_OF = "app.kubernetes.io/part-of=hermes-serve"
CHART = "hermes-serve"


class Refused(Exception):
    """The command does nothing, and this sentence says why."""


class NotPossible(Exception):
    """One fault is left out, and this sentence says why."""


@dataclass(frozen=True)
class Release:
    """One installed release.

    `revision`: to which an upgrade is rolled back; `values`: all of them, the chart's own included.
    """

    name: str
    namespace: str
    chart: str
    revision: str
    values: dict[str, Any]
    key_secret: tuple[str, str] | None

    @property
    def selector(self) -> str:
        """Selects the release's pods."""
        return f"{PART_OF},app.kubernetes.io/instance={self.name}"

    @property
    def labels(self) -> dict[str, str]:
        """The same, as labels."""
        return dict(label.split("=", 1) for label in self.selector.split(","))

    @property
    def model(self) -> str:
        """What clients call the model."""
        return str(self.values["settings"]["model"]["name"])

    @property
    def autoscaling(self) -> AutoscalingSettings | None:
        """How the number of engines follows the load; None: it does not."""
        found = self.values["settings"]["workers"].get("autoscaling")
        return AutoscalingSettings.model_validate(found) if found else None

    @property
    def heartbeat_s(self) -> float:
        """How often a stream that waits for output sends a comment."""
        default = IngressSettings().heartbeat_s
        return float(self.values["settings"]["ingress"].get("heartbeat_s", default))

    @property
    def image(self) -> str:
        """The service's image, as the chart names it."""
        image = self.values["image"]
        if image.get("digest"):
            return f"{image['repository']}@{image['digest']}"
        tag = image.get("tag") or self.chart.removeprefix(f"{CHART}-")
        return f"{image['repository']}:{tag}"

    @property
    def url(self) -> str:
        """Where the service answers within the namespace."""
        return f"http://{self.name}-serve-svc:8000"

    @property
    def has_redis(self) -> bool:
        """Whether Redis is the release's own."""
        return bool(self.values["redis"]["internal"]["enabled"])


def read(cluster: Cluster, options: Options) -> Release:
    """Ask helm.

    Raises:
        Refused: there is no such release, it is another chart's, or it is not deployed.
    """
    name = options.release
    found = cluster.read((*cluster.helm, "list", "--all", "--filter", f"^{name}$", "-o", "json"))
    return of(
        found,
        cluster.read((*cluster.helm, "get", "values", name, "--all", "-o", "json"))
        if found
        else {},
        options,
    )


def of(found: Sequence[dict[str, Any]], values: dict[str, Any], options: Options) -> Release:
    """The release, from the answers of `helm list` and `helm get values`."""
    where = f"the namespace {options.namespace}"
    if not found:
        raise Refused(f"{where} has no Helm release {options.release}: see helm list -A")
    (listed,) = found
    if not listed["chart"].startswith(f"{CHART}-"):
        raise Refused(f"the release {options.release} is of the chart {listed['chart']}, not ours")
    if listed["status"] != "deployed":
        raise Refused(
            f"the release {options.release} is {listed['status']}: wait until it is deployed, or "
            f"mend it"
        )
    return Release(
        options.release,
        options.namespace,
        listed["chart"],
        str(listed["revision"]),
        values,
        _key_secret(values, options.key_secret),
    )


def _key_secret(values: dict[str, Any], option: str) -> tuple[str, str] | None:
    if option:
        name, _, entry = option.partition("/")
        if not (name and entry):
            raise Refused(f"--key-secret {option} is not SECRET/ENTRY")
        return name, entry
    auth = values["auth"]
    return (auth["existingSecret"], auth["testKey"]) if auth["enabled"] else None
