"""Values that cannot work are refused before an install, in one sentence that names the value."""

from __future__ import annotations

import helm_python

from tests.chart.charts import (
    CHART,
    ELSEWHERE,
    EXTERNAL,
    HA,
    NAMED,
    TLS,
    Document,
    merged,
)
from tests.tables import each

OFFLINE = {"settings.model.source": "org/model", "hub.access": False}
EMPTY = {"weights.create": True, "weights.existingClaim": "", "weights.readOnly": False}
ROUTE = {
    "httpRoute.enabled": True,
    "httpRoute.hosts": ["a.example.org"],
    "httpRoute.parentRefs": [{"name": "public"}],
}

# Every row: a part of the sentence, and the values.
COMBINATIONS: list[tuple[str, Document]] = [
    ("image.repository is empty", {"image.repository": ""}),
    ("image.tag is 'latest'", {"image.tag": "latest"}),
    *(
        (f"{place}.existingSecret is empty, and Helm does not see the cluster", changes)
        for place, changes in (
            ("auth", {"auth.existingSecret": ""}),
            ("redis.internal", {"redis.internal.existingSecret": ""}),
            ("redis.ha", {**HA, "redis.ha.existingSecret": ""}),
        )
    ),
    ("redis.external.existingSecret is empty", ELSEWHERE),
    ("redis.external.gcsAddress is empty", {**ELSEWHERE, "redis.external.existingSecret": "s"}),
    (
        "redis.external.cidrs is empty",
        {**ELSEWHERE, "redis.external.existingSecret": "s", "gcsFaultTolerance.enabled": False},
    ),
    (
        "exactly one must be enabled, but these are: redis.internal, redis.external",
        {"redis.external.enabled": True},
    ),
    ("exactly one must be enabled, but these are: none", {"redis.internal.enabled": False}),
    ("redis.ha.name is empty", {**HA, "redis.ha.name": ""}),
    (
        "redis.internal.exporter.enabled needs redis.internal",
        {**HA, "redis.internal.exporter.enabled": True},
    ),
    (
        "has the port 6380, which is not among redis.external.ports",
        {**EXTERNAL, "redis.external.gcsAddress": "redis.example.org:6380"},
    ),
    (
        "redis.external.gcsAddress (redis.example.org:6379) is not rediss://host:port",
        {**EXTERNAL, "redis.external.caKey": "ca.pem"},
    ),
    ("keys in Redis that begin with RAY belong to Ray", {"settings.namespace": "RAYS"}),
    (
        "args.tensor-parallel-size is set by workers.tensor_parallel_size",
        {"settings.engine.args": {"tensor-parallel-size": 2}},
    ),
    ("args.max_len is no argument of vLLM", {"settings.engine.args": {"max_len": 1}}),
    (
        "args.chat-template takes the full path",
        {"settings.engine.args": {"chat-template": "chat.jinja"}},
    ),
    ("settings has a text with a character", {"settings.engine.args": {"revision": "a\x7f"}}),
    ("env has a text with a character", {"env": {"A": "\ufffe"}}),
    ("args.chat_template is empty", {"settings.engine.args": {"chat_template": ""}}),
    ("settings.model.name takes no spaces", {"settings.model.name": "a b"}),
    ("settings.model.aliases takes no spaces", {"settings.model.aliases": ["gpt-*", "gpt-?"]}),
    (
        "both are set: remove settings.workers.stall_s",
        {"settings.workers.stall_s": 5, "settings.workers.engine_stall_timeout_s": 5},
    ),
    (
        "settings.ingress.cors_origins takes '*' and origins",
        {"settings.ingress.cors_origins": ["*", "chat.example.com"]},
    ),
    *(
        ("image.repository is", {"image.repository": repository})
        for repository in ("https://r.example/a", "a:1")
    ),
    *(
        (f"env.{name} ", {f"env.{name}": "1"})
        for name in ("VLLM_API_KEY", "HERMES_KEYS_FILE", "RAY_AUTH_TOKEN", "HF_TOKEN")
    ),
    *(
        (f"{place}extraEnv: HF_TOKEN is set", {f"{place}extraEnv": [{"name": "HF_TOKEN"}]})
        for place in ("", "head.", "ingressPods.", "engines.")
    ),
    (
        "min_replicas (9) is above max_replicas (8)",
        {"settings.workers.autoscaling.min_replicas": 9},
    ),
    ("env.RAY_SERVE_ENABLE_HA_PROXY is not '1'", {"env.RAY_SERVE_ENABLE_HA_PROXY": "0"}),
    (
        "networkPolicy.tracesTo is empty",
        {"settings.telemetry.traces_endpoint": "http://otel:4318/v1/traces"},
    ),
    ("networkPolicy.storageTo is empty", {"settings.files.storage": "s3://bucket"}),
    (
        "settings.files.storage is the folder /files, on which ingressPods.extraVolumeMounts",
        {
            "settings.files.storage": "/files",
            "extraVolumeMounts": [{"name": "a", "mountPath": "/files/below"}],
        },
    ),
    ("engines do not ask the hub", {"hub.existingSecret": "hub"}),
    (
        "4 GPUs (settings.workers.tensor_parallel_size), but a pod has 2 (engines.gpus)",
        {"settings.workers.tensor_parallel_size": 4, "engines.gpus": 2},
    ),
    ("gpus_per_replica (0.5) is below settings", {"settings.workers.gpus_per_replica": 0.5}),
    ("one engine takes 2 GPUs", {"settings.workers.gpus_per_replica": 2}),
    ("settings.workers.device is 'cpu'", {"settings.workers.device": "cpu"}),
    (
        "4 engines in one pod reserve 3 CPUs each",
        {"engines.gpus": 4, "engines.cpus": 8, "settings.workers.cpus_per_replica": 3},
    ),
    (
        "no engine fits into a pod",
        {
            "settings.workers.device": "cpu",
            "settings.workers.cpus_per_replica": 9,
            "engines.gpus": 0,
            "engines.cpus": 8,
        },
    ),
    ("8 ingresses with 1 CPUs each", {"settings.ingress.replicas": 8}),
    (
        "at most 1 per pod (max_replicas_per_node), do not fit into 2 pods",
        {
            "settings.ingress.replicas": 3,
            "settings.ingress.max_replicas_per_node": 1,
            "ingressPods.cpus": 4,
        },
    ),
    (
        "request_timeout_s (7200) is above max_request_timeout_s (3600)",
        {"settings.ingress.request_timeout_s": 7200},
    ),
    (
        "redis.internal.maxmemory (6gb) is above 70 % of redis.internal.memory (8Gi)",
        {"redis.internal.maxmemory": "6gb"},
    ),
    (
        "redis.internal.maxmemory (4gb) is above half of redis.internal.persistence.size (7Gi)",
        {"redis.internal.persistence.size": "7Gi"},
    ),
    ("model is empty: set it to a hub id", {"settings.model": {"name": "a", "source": ""}}),
    (
        "model (org/a) and settings.model.source (/models/big) are both set, but differ",
        {"model": "org/a"},
    ),
    (
        "settings.model.source takes a folder by its full path, a hub id",
        {"settings.model.source": "", "model": "a b"},
    ),
    ("weights.create and weights.existingClaim are both set", {"weights.create": True}),
    ("but there is no volume", {"weights.existingClaim": ""}),
    ("is not below weights.mountPath", {"settings.model.source": "/data/m"}),
    (
        "is a hub id, but hub.access is false",
        {**OFFLINE, "weights.existingClaim": ""},
    ),
    (
        "weights.accessModes has no ReadWriteMany, but up to 2 engine pods",
        {**EMPTY, "settings.workers.replicas": 2, "weights.accessModes": ["ReadWriteOnce"]},
    ),
    (
        "weights.accessModes has no ReadWriteMany, but during an upgrade a second Ray cluster",
        {**EMPTY, "weights.accessModes": ["ReadWriteOnce"]},
    ),
    ("weights.readOnly prevents filling it", {**EMPTY, "weights.readOnly": True}),
    (
        "weights.accessModes has neither ReadWriteMany nor ReadWriteOnce",
        {**EMPTY, "weights.accessModes": ["ReadOnlyMany"]},
    ),
    (
        "the model (org/model) is a hub id, but hub.access is false: set a path",
        OFFLINE,
    ),
    ("are both true: choose one", {**ROUTE, "ingress.enabled": True, "ingress.host": "a.b"}),
    ("ingress.host is empty", {"ingress.enabled": True}),
    ("httpRoute.hosts is empty", {**ROUTE, "httpRoute.hosts": []}),
    ("httpRoute.parentRefs is empty", {**ROUTE, "httpRoute.parentRefs": []}),
    ("networkPolicy.servingFrom is empty", ROUTE),
    (
        "networkPolicy.apiServerCidrs is empty",
        {
            "settings.workers.autoscaling.min_replicas": 1,
            "settings.workers.autoscaling.max_replicas": 2,
            "networkPolicy.apiServerCidrs": [],
        },
    ),
    (
        "so the job of helm uninstall could not delete the RayService",
        {"networkPolicy.apiServerCidrs": []},
    ),
    ("uninstall.timeoutSeconds (240) is below 690", {"drainSeconds": 600}),
    *(
        (f"{place}podLabels has {label}, by which", {f"{place}podLabels": {label: "a"}})
        for place in ("", "head.", "redis.internal.", "uninstall.", "tests.")
        for label in (
            "app.kubernetes.io/component",
            "app.kubernetes.io/instance",
            "app.kubernetes.io/part-of",
            "ray.io/cluster",
        )
    ),
    *(
        (f"{place}podAnnotations has {name}", {f"{place}podAnnotations": {name: "a"}})
        for place in ("", "engines.", "ingressPods.", "uninstall.", "tests.")
        for name in ("helm.sh/hook", "hermes-serve/config", "ray.io/ft-enabled")
    ),
    ("commonLabels has ray.io/cluster, by which", {"commonLabels": {"ray.io/cluster": "a"}}),
    ("commonAnnotations has helm.sh/hook", {"commonAnnotations": {"helm.sh/hook": "a"}}),
    ("networkPolicy.hubCidrs is empty", {"hub.access": True, "networkPolicy.hubCidrs": []}),
]

_SPREAD = {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
_TERM = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
# Every row: where it stands, and its value.
SCHEDULES: list[tuple[str, Document]] = [
    ("tolerations/0/value", {"tolerations": [{"key": "gpu", "value": True}]}),
    ("tolerations/0/tolerationSeconds", {"tolerations": [{"tolerationSeconds": "30"}]}),
    ("tolerations/0/effect", {"tolerations": [{"effect": "NoShedule"}]}),
    ("tolerations/0", {"tolerations": [{"name": "gpu"}]}),
    (
        "topologySpreadConstraints/0/maxSkew",
        {"topologySpreadConstraints": [{**_SPREAD, "maxSkew": "1"}]},
    ),
    ("topologySpreadConstraints/0", {"topologySpreadConstraints": [_SPREAD]}),
    ("affinity", {"affinity": {"podAntiAfinity": {}}}),
    ("affinity/podAffinity", {"affinity": {"podAffinity": {"required": [_TERM]}}}),
    (
        "affinity/podAntiAffinity/" + _REQUIRED,
        {"affinity": {"podAntiAffinity": {_REQUIRED: _TERM}}},
    ),
    (
        f"affinity/nodeAffinity/{_REQUIRED}/nodeSelectorTerms/0/matchExpressions/0/operator",
        {
            "affinity": {
                "nodeAffinity": {
                    _REQUIRED: {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "a", "operator": "Is"}]}
                        ]
                    }
                }
            }
        },
    ),
    ("nodeSelector/gpu", {"nodeSelector": {"gpu": True}}),
    ("nodeSelector/gpu", {"nodeSelector": {"gpu": "h 100"}}),
    ("nodeSelector", {"nodeSelector": {"gpu type": "h100"}}),
]

# Every row: where it stands, and the values.
OTHER_TYPES: list[tuple[str, Document]] = [
    ("podSecurityContext", {"podSecurityContext": {"runasuser": 1}}),
    ("podLabels/a", {"podLabels": {"a": "a" * 64}}),
    ("uninstall/podAnnotations", {"uninstall.podAnnotations": {"a b": "c"}}),
    ("imagePullSecrets/0/name", {"imagePullSecrets": [{"name": ""}]}),
    ("imagePullSecrets/0", {"imagePullSecrets": ["registry"]}),
    ("extraVolumes/0", {"extraVolumes": [{"emptyDir": {}}]}),
    ("engines/resources", {"engines.resources": {"cpu": 1}}),
    ("monitoring/labels/release", {"monitoring.labels": {"release": True}}),
    (
        "httpRoute/parentRefs/0/port",
        {"httpRoute.parentRefs": [{"name": "a", "port": "80"}]},
    ),
    (
        "networkPolicy/servingFrom/0/namespaceSelector",
        {"networkPolicy.servingFrom": [{"namespaceSelector": {"name": "a"}}]},
    ),
    (
        "networkPolicy/tracesTo/0/ipBlock/cidr",
        {"networkPolicy.tracesTo": [{"ipBlock": {"cidr": "10.0.0.1"}}]},
    ),
]

# Every row: what the schema says, and the values.
SHAPES: list[tuple[str, Document]] = [
    ("additional properties 'hpa' not allowed", {"hpa.enabled": True}),
    ("at '/settings/redis'", {"settings.redis.url": "redis://:x@h"}),
    ("additional properties 'auth' not allowed", {"settings.auth.required": False}),
    ("at '/networkPolicy/hubCidrs/0'", {"networkPolicy.hubCidrs": ["everywhere"]}),
    *(
        (f"at '/{path.replace('.', '/')}'", {path: value})
        for path, value in {
            "redis.ha.replicas": 2,
            "redis.internal.appendfsync": "no",
            "head.memory": "8",
            "ingressPods.replicas": 0,
            "settings.journal.retention_s": "15m",
            "head.tmpSize": "10",
            "engines.homeSize": "",
            "podLabels.team": 7,
            "podSecurityContext.runAsUser": "10001",
            "containerSecurityContext.capabilities.drop": "ALL",
            "redis.internal.containerSecurityContext.readOnlyRootFilesystem": "yes",
        }.items()
    ),
    *((f"at '/{place}'", value) for place, value in SCHEDULES),
    *(
        (f"at '/{section}/tolerations/0/value'", {section.replace("/", "."): SCHEDULES[0][1]})
        for section in ("head", "ingressPods", "engines", "redis/internal", "uninstall", "tests")
    ),
    *((f"at '/{place}'", values) for place, values in OTHER_TYPES),
]


def refusal(values: Document, name: str = "hermes") -> str:
    """Helm's error message; empty if the chart renders. Helm checks the schema before it does."""
    chart = helm_python.Chart.load(str(CHART))
    try:
        chart.render(values, name=name, namespace="prod")
    except helm_python.HelmError as error:
        return str(error)
    return ""


@each("sentence, changes", COMBINATIONS + SHAPES)
def test_what_cannot_work_is_refused_where_it_stands(sentence: str, changes: Document) -> None:
    assert sentence in refusal(merged(NAMED, changes))


# Near what is refused, and right.
ALLOWED: list[Document] = [
    {**EXTERNAL, **TLS},
    {**EXTERNAL, "redis.external.gcsAddress": "r:6380", "redis.external.ports": [6379, 6380]},
    {
        **EXTERNAL,
        "redis.external.gcsAddress": "",
        "redis.external.caKey": "ca",
        "gcsFaultTolerance.enabled": False,
    },
    {"settings.model.source": "a/b", "hub.access": False, "env.HF_HOME": "/models/hub"},
    {"settings.model.source": "", "model": "org/model"},
    {"settings.model.aliases": ["claude-*", "qwen3:8b", "*"]},
    {"model": "/models/big"},
    {"redis.internal.exporter.extraEnv": [{"name": "REDIS_EXPORTER_SKIP_TLS_VERIFICATION"}]},
    {**EMPTY, "weights.accessModes": ["ReadWriteOnce"], "upgrade.type": "None"},
    {
        "redis.internal.maxmemory": "7gb",
        "redis.internal.memory": "10Gi",
        "redis.internal.persistence.size": "1Ti",
    },
    {"settings.engine.args": {"max-model-len": 8192, "chat_template": "/opt/chat.jinja"}},
    {"settings.ingress.cors_origins": ["*", "https://chat.example.com:8443"]},
    {"image.repository": "localhost:5000/team/hermes_serve.cpu"},
    {"env.VLLM_LOGGING_LEVEL": "DEBUG", "env.RAY_gcs_rpc_server_reconnect_timeout_s": "90"},
    {"enabled": True, "tags": {"llm": True}},
    {"podLabels": {"app.kubernetes.io/name": "llm", "cost-centre": ""}},
    {"head.tolerations": [{"operator": "Exists"}, {"key": "a", "effect": ""}]},
    {"engines.affinity.podAntiAffinity": {_REQUIRED: [_TERM]}},
]


@each("changes", ALLOWED)
def test_what_works_is_taken(changes: Document) -> None:
    assert refusal(merged(NAMED, changes)) == ""


@each(
    "name, sentence",
    [
        ("h" * 47, "has 47 characters, but KubeRay and the StatefulSet of an internal Redis allow"),
        ("7b", "must begin with a letter"),
    ],
)
def test_a_release_name_that_kuberay_would_refuse_is_refused(name: str, sentence: str) -> None:
    assert sentence in refusal(NAMED, name)


def test_the_longest_name_that_fits_is_taken() -> None:
    assert "allow at most 47" in refusal(merged(NAMED, EXTERNAL), "h" * 48)
    assert "allow at most 46" in refusal(merged(NAMED, {"fullnameOverride": "h" * 47}))
    assert refusal(NAMED, "h" * 46) == ""
    assert refusal(merged(NAMED, EXTERNAL), "h" * 47) == ""
