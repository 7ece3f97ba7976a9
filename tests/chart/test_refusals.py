"""Values that cannot work are refused before an install, in one sentence that names the value."""

from __future__ import annotations

import helm_python

from tests.chart.charts import CHART, NAMED, Document, merged, stage_values
from tests.chart.test_objects import EXTERNAL, HA, TLS
from tests.tables import each

EMPTY = {"create": True, "existingClaim": "", "readOnly": False}
ROUTE = {"enabled": True, "hosts": ["a.example.org"], "parentRefs": [{"name": "public"}]}

# Every row: the changes, and a part of the sentence.
COMBINATIONS: dict[str, tuple[Document, str]] = {
    "no image": ({"image": {"repository": ""}}, "image.repository is empty"),
    "the latest image": ({"image": {"tag": "latest"}}, "image.tag is 'latest'"),
    "the latest Redis": (
        {"redis": {"internal": {"image": {"tag": "latest"}}}},
        "redis.internal.image.tag is 'latest'",
    ),
    "no keys": ({"auth": {"existingSecret": ""}}, "auth.existingSecret is empty"),
    "no passwords": (
        {"redis": {"internal": {"existingSecret": ""}}},
        "redis.internal.existingSecret is empty",
    ),
    "a URL from nowhere": (
        {"redis": {"internal": {"enabled": False}, "external": {"enabled": True}}},
        "redis.external.existingSecret is empty",
    ),
    "a GCS without an address": (
        {
            "redis": {
                "internal": {"enabled": False},
                "external": {"enabled": True, "existingSecret": "s"},
            }
        },
        "redis.external.gcsAddress is empty",
    ),
    "a Redis behind the network policy": (
        {
            "redis": {
                "internal": {"enabled": False},
                "external": {"enabled": True, "existingSecret": "s"},
            },
            "gcsFaultTolerance": {"enabled": False},
        },
        "redis.external.cidrs is empty",
    ),
    "two Redis": (
        {"redis": {"external": {"enabled": True}}},
        "exactly one must be enabled, but these are: redis.internal, redis.external",
    ),
    "no Redis": (
        {"redis": {"internal": {"enabled": False}}},
        "exactly one must be enabled, but these are: none",
    ),
    "one Redis beside three": (
        {"redis": {"ha": {"enabled": True}}},
        "exactly one must be enabled, but these are: redis.internal, redis.ha",
    ),
    "three Redis without passwords": (
        merged(HA, {"redis": {"ha": {"existingSecret": ""}}}),
        "redis.ha.existingSecret is empty",
    ),
    "three Redis without a name": (
        merged(HA, {"redis": {"ha": {"name": ""}}}),
        "redis.ha.name is empty",
    ),
    "an exporter beside three Redis": (
        merged(HA, {"redis": {"internal": {"exporter": {"enabled": True}}}}),
        "redis.internal.exporter.enabled needs redis.internal",
    ),
    "a port that the network policy stops": (
        merged(EXTERNAL, {"redis": {"external": {"gcsAddress": "redis.example.org:6380"}}}),
        "has the port 6380, which is not among redis.external.ports",
    ),
    "certificates for a GCS without TLS": (
        merged(EXTERNAL, {"redis": {"external": {"caKey": "ca.pem"}}}),
        "redis.external.gcsAddress (redis.example.org:6379) is not rediss://host:port",
    ),
    "the journal among Ray's keys": (
        {"settings": {"namespace": "RAYS"}},
        "keys in Redis that begin with RAY belong to Ray",
    ),
    "ranks by vLLM's own argument": (
        {"settings": {"engine": {"args": {"tensor-parallel-size": 2}}}},
        "settings.engine.args.tensor-parallel-size is derived from "
        "settings.workers.tensor_parallel_size",
    ),
    "another name for the model": (
        {"settings": {"engine": {"args": {"served_model_name": "x"}}}},
        "is derived from settings.model.name",
    ),
    "more at once than the service knows": (
        {"settings": {"engine": {"args": {"max_num_seqs": 1}}}},
        "is derived from settings.workers.max_running_requests",
    ),
    "Serve's own proxy": (
        {"env": {"RAY_SERVE_ENABLE_HA_PROXY": "0"}},
        "env.RAY_SERVE_ENABLE_HA_PROXY is not '1'",
    ),
    "another token for Ray": (
        {"env": {"RAY_AUTH_TOKEN": "x"}},
        "env.RAY_AUTH_TOKEN is set by the chart or by KubeRay",
    ),
    "a secret in the environment": (
        {"env": {"HF_TOKEN": "hf_x"}},
        "env.HF_TOKEN is set by the chart",
    ),
    "traces that the network stops": (
        {"settings": {"telemetry": {"traces_endpoint": "http://otel:4318/v1/traces"}}},
        "networkPolicy.tracesTo is empty",
    ),
    "a token that nothing uses": ({"hub": {"existingSecret": "hub"}}, "hub.access is false"),
    "more ranks than GPUs": (
        {"settings": {"workers": {"tensor_parallel_size": 4}}, "engines": {"gpus": 2}},
        "one engine takes 4 GPUs (settings.workers.tensor_parallel_size), but a pod has 2 "
        "(engines.gpus)",
    ),
    "more GPUs by hand than there are": (
        {"settings": {"workers": {"gpus_per_replica": 2}}},
        "one engine takes 2 GPUs",
    ),
    "no GPUs": ({"engines": {"gpus": 0}}, "but a pod has 0 (engines.gpus)"),
    "GPUs for a CPU": (
        {"settings": {"workers": {"device": "cpu"}}},
        "settings.workers.device is 'cpu'",
    ),
    "the least above the most": (
        {"settings": {"workers": {"autoscaling": {"min_replicas": 9, "max_replicas": 8}}}},
        "min_replicas (9) is above max_replicas (8)",
    ),
    "engines without CPUs": (
        {"engines": {"gpus": 4, "cpus": 8}, "settings": {"workers": {"cpus_per_replica": 3}}},
        "4 engines in one pod reserve 3 CPUs each",
    ),
    "an engine without CPUs": (
        {
            "settings": {"workers": {"device": "cpu", "cpus_per_replica": 9}},
            "engines": {"gpus": 0, "cpus": 8},
        },
        "no engine fits into a pod",
    ),
    "ingresses without room": (
        {"settings": {"ingress": {"replicas": 8}}},
        "8 ingresses with 1 CPUs each",
    ),
    "ingresses without a pod": (
        {
            "settings": {"ingress": {"replicas": 3, "max_replicas_per_node": 1}},
            "ingressPods": {"cpus": 4},
        },
        "3 ingresses (settings.ingress.replicas), at most 1 per pod (max_replicas_per_node), do "
        "not fit into 2 pods",
    ),
    "a deadline above the longest": (
        {"settings": {"ingress": {"request_timeout_s": 7200}}},
        "request_timeout_s (7200) is above max_request_timeout_s (3600)",
    ),
    "a Redis fuller than its memory": (
        {"redis": {"internal": {"maxmemory": "6gb"}}},
        "redis.internal.maxmemory (6gb) is above 70 % of redis.internal.memory (8Gi)",
    ),
    "a Redis fuller than its disk": (
        {"redis": {"internal": {"persistence": {"size": "7Gi"}}}},
        "redis.internal.maxmemory (4gb) is above half of redis.internal.persistence.size (7Gi)",
    ),
    "no model": (
        {"settings": {"model": {"source": ""}}},
        "settings.model.name and settings.model.source are needed",
    ),
    "two volumes": (
        {"weights": {"create": True}},
        "weights.create and weights.existingClaim are both set",
    ),
    "a path without a volume": ({"weights": {"existingClaim": ""}}, "but there is no volume"),
    "a path elsewhere": (
        {"settings": {"model": {"source": "/data/m"}}},
        "is not below weights.mountPath",
    ),
    "a hub id without the hub": (
        {"settings": {"model": {"source": "org/model"}}, "weights": {"existingClaim": ""}},
        "is a hub id, but hub.access is false",
    ),
    "one volume for many nodes": (
        {
            "settings": {"workers": {"replicas": 2}},
            "weights": {**EMPTY, "accessModes": ["ReadWriteOnce"]},
        },
        "weights.accessModes has no ReadWriteMany, but up to 2 engine pods",
    ),
    "one volume for two clusters": (
        {"weights": {**EMPTY, "accessModes": ["ReadWriteOnce"]}},
        "weights.accessModes has no ReadWriteMany, but during an upgrade a second Ray cluster",
    ),
    "an empty volume that stays empty": (
        {"weights": {**EMPTY, "readOnly": True}},
        "weights.readOnly prevents filling it",
    ),
    "a volume that nobody may write": (
        {"weights": {**EMPTY, "accessModes": ["ReadOnlyMany"]}},
        "weights.accessModes has neither ReadWriteMany nor ReadWriteOnce",
    ),
    "a hub id beside a path": (
        {"settings": {"model": {"source": "org/model"}}},
        "settings.model.source (org/model) is a hub id, but hub.access is false: set a path",
    ),
    "two doors": (
        {"ingress": {"enabled": True, "host": "a.b"}, "httpRoute": ROUTE},
        "are both true: choose one",
    ),
    "a door without a name": ({"ingress": {"enabled": True}}, "ingress.host is empty"),
    "a route without a name": ({"httpRoute": {**ROUTE, "hosts": []}}, "httpRoute.hosts is empty"),
    "a route without a gateway": (
        {"httpRoute": {**ROUTE, "parentRefs": []}},
        "httpRoute.parentRefs is empty",
    ),
    "a door that the network policy shuts": (
        {"httpRoute": ROUTE},
        "networkPolicy.servingFrom is empty",
    ),
    "an autoscaler that the network policy shuts in": (
        {
            "settings": {"workers": {"autoscaling": {"min_replicas": 1, "max_replicas": 2}}},
            "networkPolicy": {"apiServerCidrs": []},
        },
        "networkPolicy.apiServerCidrs is empty",
    ),
    "an uninstall that the network policy shuts in": (
        {"networkPolicy": {"apiServerCidrs": []}},
        "so the job of helm uninstall could not delete the RayService",
    ),
    "an uninstall that gives up before pods may have ended": (
        {"drainSeconds": 600},
        "uninstall.timeoutSeconds (240) is below 690",
    ),
    "a hub that the network policy shuts out": (
        {"hub": {"access": True}, "networkPolicy": {"hubCidrs": []}},
        "networkPolicy.hubCidrs is empty",
    ),
}

# Every row: the changes, and where the schema finds them.
SHAPES: dict[str, tuple[Document, str]] = {
    "two Redis for Sentinel": ({"redis": {"ha": {"replicas": 2}}}, "at '/redis/ha/replicas'"),
    "a key that is not there": (
        {"hpa": {"enabled": True}},
        "additional properties 'hpa' not allowed",
    ),
    "a misspelt key": (
        {"engines": {"gpu": 1}},
        "at '/engines': additional properties 'gpu' not allowed",
    ),
    "a setting that is not there": (
        {"settings": {"workers": {"replica": 1}}},
        "at '/settings/workers'",
    ),
    "a password in the settings": (
        {"settings": {"redis": {"url": "redis://:x@h"}}},
        "at '/settings/redis'",
    ),
    "keys in the settings": (
        {"settings": {"auth": {"required": False}}},
        "additional properties 'auth' not allowed",
    ),
    "another fsync": (
        {"redis": {"internal": {"appendfsync": "no"}}},
        "at '/redis/internal/appendfsync'",
    ),
    "memory without a unit": ({"head": {"memory": "8"}}, "at '/head/memory'"),
    "half a CPU for Ray": ({"engines": {"cpus": 0.5}}, "at '/engines/cpus'"),
    "a digest cut short": ({"image": {"digest": "sha256:abc"}}, "at '/image/digest'"),
    "a name that Kubernetes refuses": (
        {"auth": {"existingSecret": "My_Keys"}},
        "at '/auth/existingSecret'",
    ),
    "no ingress pods": ({"ingressPods": {"replicas": 0}}, "at '/ingressPods/replicas'"),
    "no tensor parallelism": (
        {"settings": {"workers": {"tensor_parallel_size": 0}}},
        "/tensor_parallel_size",
    ),
    "an upgrade in place": ({"upgrade": {"type": "Recreate"}}, "at '/upgrade/type'"),
    "a network that is none": (
        {"networkPolicy": {"hubCidrs": ["everywhere"]}},
        "at '/networkPolicy/hubCidrs/0'",
    ),
    "text for a number": (
        {"settings": {"journal": {"retention_s": "15m"}}},
        "at '/settings/journal/retention_s'",
    ),
}


def refusal(values: Document, name: str = "hermes") -> str:
    """Helm's error message; empty if the chart renders. Helm checks the schema before it does."""
    chart = helm_python.Chart.load(str(CHART))
    try:
        chart.render(values, name=name, namespace="prod")
    except helm_python.HelmError as error:
        return str(error)
    return ""


@each("what", COMBINATIONS | SHAPES)
def test_what_cannot_work_is_refused_where_it_stands(what: str) -> None:
    changes, sentence = (COMBINATIONS | SHAPES)[what]
    assert sentence in refusal(merged(NAMED, changes))


# Near what is refused, and right.
ALLOWED: dict[str, Document] = {
    "TLS to Redis": merged(EXTERNAL, TLS),
    "another port": merged(
        EXTERNAL, {"redis": {"external": {"gcsAddress": "r:6380", "ports": [6379, 6380]}}}
    ),
    "no GCS there": merged(
        EXTERNAL,
        {
            "redis": {"external": {"gcsAddress": "", "caKey": "ca"}},
            "gcsFaultTolerance": {"enabled": False},
        },
    ),
    "the hub's files on a volume": {
        "settings": {"model": {"source": "a/b"}},
        "env": {"HF_HOME": "/models/hub"},
    },
    "one volume for one cluster": {
        "weights": {**EMPTY, "accessModes": ["ReadWriteOnce"]},
        "upgrade": {"type": "None"},
    },
    "a Redis at its bounds": {
        "redis": {
            "internal": {"maxmemory": "7gb", "memory": "10Gi", "persistence": {"size": "1Ti"}}
        },
    },
    "vLLM's other arguments": {"settings": {"engine": {"args": {"max-model-len": 8192}}}},
}


@each("what", ALLOWED)
def test_what_works_is_taken(what: str) -> None:
    assert refusal(merged(NAMED, ALLOWED[what])) == ""


@each(
    "name, sentence",
    [
        ("h" * 48, "has 48 characters, but KubeRay allows at most 47"),
        ("h" * 47, "has 47 characters, but with an internal Redis at most 46 are possible"),
        ("7b", "must begin with a letter"),
    ],
)
def test_a_release_name_that_kuberay_would_refuse_is_refused(name: str, sentence: str) -> None:
    assert sentence in refusal(NAMED, name)


def test_the_longest_name_that_fits_is_taken() -> None:
    assert refusal(NAMED, "h" * 46) == ""
    assert refusal(merged(NAMED, EXTERNAL), "h" * 47) == ""


@each("stage", ["single-gpu", "multi-gpu", "multi-node"])
def test_a_stage_file_alone_says_what_is_missing(stage: str) -> None:
    values = stage_values(stage)
    for key in ("image", "auth", "redis", "weights"):
        values.pop(key, None)
    assert "image.repository is empty" in refusal(values)
