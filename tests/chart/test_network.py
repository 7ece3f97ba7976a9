"""Which pods can reach which: the network policies, interpreted as Kubernetes does."""

from __future__ import annotations

from tests.chart.charts import (
    EVERYTHING,
    EXTERNAL,
    Document,
    documents,
    merged,
    one,
    pod_templates,
    stage_values,
)
from tests.chart.test_references import found, matches, of_kind
from tests.tables import each

ALL = merged(stage_values("multi-node"), EVERYTHING)


def reaches(objects: list[Document], source: str, target: str, port: int) -> bool:
    """Whether a pod of ours may speak to another, by both ends' policies. `source` may be a
    namespace, `ns/name`, or another pod in this one, `pod/name`.
    """
    return _allows(objects, "Ingress", target, source, port) and (
        "/" in source or _allows(objects, "Egress", source, target, port)
    )


def _allows(objects: list[Document], way: str, pod: str, peer: str, port: int) -> bool:
    pods = {
        name: template["metadata"]["labels"] for name, template in pod_templates(objects).items()
    }
    specs = [item["spec"] for item in of_kind(objects, "NetworkPolicy")]
    of_pod = [s for s in specs if way in s["policyTypes"] and matches(s["podSelector"], pods[pod])]
    assert of_pod, f"{pod} is not isolated"
    peers = "from" if way == "Ingress" else "to"
    return any(
        _port(rule, port) and any(_peer(one_peer, peer, pods) for one_peer in rule[peers])
        for spec in of_pod
        for rule in spec.get(way.lower(), [])
    )


def _port(rule: Document, port: int) -> bool:
    return "ports" not in rule or any(
        p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"]
    )


def _peer(peer: Document, who: str, pods: dict[str, Document]) -> bool:
    kind, _, name = who.rpartition("/")
    if kind == "ns":
        labels = {"kubernetes.io/metadata.name": name}
        return "namespaceSelector" in peer and matches(peer["namespaceSelector"], labels)
    return (
        "podSelector" in peer
        and "namespaceSelector" not in peer
        and matches(peer["podSelector"], pods.get(name, {"app": name}))
    )


@each("pod", ["head", "ingress", "engine", "redis", "test", "uninstall"])
def test_every_pod_is_cut_off_unless_a_rule_says_otherwise(pod: str) -> None:
    objects = documents(ALL)
    assert not reaches(objects, "ns/elsewhere", pod, 8000)
    for port in (6379, 8265, 9121, 10001):
        assert not reaches(objects, "ns/elsewhere", pod, port)
        assert not reaches(objects, "pod/stranger", pod, port), "another pod of this namespace"


@each(
    "source, target, port, may",
    [
        ("engine", "redis", 6379, True),
        ("ingress", "redis", 6379, True),
        ("head", "redis", 6379, True),
        ("test", "redis", 6379, False),
        ("ns/monitoring", "redis", 6379, False),
        ("ns/monitoring", "redis", 9121, True),
        ("redis", "head", 6379, False),
        ("ingress", "head", 6379, True),
        ("head", "engine", 30123, True),
        ("test", "head", 8265, False),
        ("test", "ingress", 8000, True),
        ("ns/kuberay-operator", "head", 8265, True),
        ("ns/kuberay-operator", "head", 8000, True),
        ("ns/kuberay-operator", "head", 10001, False),
        ("ns/ingress-nginx", "ingress", 8000, True),
        ("ns/ingress-nginx", "head", 8265, False),
        ("ns/monitoring", "engine", 8080, True),
        ("ns/monitoring", "head", 8265, False),
    ],
)
def test_pods_reach_what_they_need_and_nothing_else(
    source: str, target: str, port: int, may: bool
) -> None:
    assert reaches(documents(ALL), source, target, port) is may


def test_without_other_sources_only_this_namespace_may_call() -> None:
    objects = documents(stage_values("multi-gpu"))
    assert not reaches(objects, "ns/ingress-nginx", "ingress", 8000)
    policy = one(objects, "NetworkPolicy", "hermes-ray")
    serving = [rule for rule in policy["spec"]["ingress"] if rule.get("ports") == [{"port": 8000}]]
    assert [rule["from"] for rule in serving] == [[{"podSelector": {}}]]


# Every address but private ones and that of a cloud's metadata.
THE_INTERNET = {
    "cidr": "0.0.0.0/0",
    "except": ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"],
}


@each(
    "changes, ways_out",
    [
        ({}, []),
        ({"hub.access": True}, [THE_INTERNET]),
        (EXTERNAL, [{"cidr": "10.1.2.3/32"}]),
    ],
)
def test_the_hub_is_reached_only_where_access_is_asked_for(
    changes: Document, ways_out: list[Document]
) -> None:
    objects = documents(merged(stage_values("multi-node"), changes))
    policy = one(objects, "NetworkPolicy", "hermes-ray")["spec"]["egress"]
    assert list(found(policy, "ipBlock")) == ways_out


def test_only_a_head_that_scales_speaks_to_the_kubernetes_api() -> None:
    scaling = one(documents(stage_values("multi-node")), "NetworkPolicy", "hermes-autoscaler")
    assert scaling["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "head"
    (rule,) = scaling["spec"]["egress"]
    assert [port["port"] for port in rule["ports"]] == [443, 6443]
    fixed = documents(stage_values("multi-gpu"))
    assert "hermes-autoscaler" not in {item["metadata"]["name"] for item in fixed}


def test_the_uninstall_job_reaches_the_kubernetes_api_and_nothing_else() -> None:
    values = {
        "networkPolicy.apiServerCidrs": ["10.0.0.1/32"],
        "networkPolicy.apiServerPorts": [443, 16443],
    }
    objects = documents(merged(stage_values("multi-gpu"), values))
    labels = pod_templates(objects)["uninstall"]["metadata"]["labels"]
    policies = [
        policy
        for policy in of_kind(objects, "NetworkPolicy")
        if matches(policy["spec"]["podSelector"], labels)
    ]
    assert {item["metadata"]["name"] for item in policies} == {"hermes-deny", "hermes-uninstall"}
    (rules,) = [item["spec"]["egress"] for item in policies if "egress" in item["spec"]]
    ports = [{"port": 443}, {"port": 16443}]
    assert rules == [{"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}], "ports": ports}]


@each("policy", ["hermes-ray", "hermes-test"])
def test_dns_is_asked_on_the_ports_where_its_pods_listen(policy: str) -> None:
    values = merged(stage_values("multi-gpu"), {"networkPolicy.dnsPorts": [53, 5353]})
    asked = [
        [(port["protocol"], port["port"]) for port in rule["ports"]]
        for rule in one(documents(values), "NetworkPolicy", policy)["spec"]["egress"]
        if any("namespaceSelector" in peer for peer in rule["to"])
    ]
    assert asked == [[("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353)]]


def test_files_may_only_leave_for_their_s3() -> None:
    s3 = {"ipBlock": {"cidr": "10.1.2.0/24"}}
    values: Document = {
        "networkPolicy.storageTo": [s3],
        "networkPolicy.storagePorts": [443, 9000],
    }
    rule = {"to": [s3], "ports": [{"port": 443}, {"port": 9000}]}
    for storage, wanted in (("s3://bucket/prefix", True), ("", False)):
        its = values | {"settings.files.storage": storage}
        objects = documents(merged(stage_values("multi-node"), its))
        policy = one(objects, "NetworkPolicy", "hermes-ray")
        assert (rule in policy["spec"]["egress"]) is wanted


@each("mounted", ["/files", "/files/", "/"])
def test_a_folder_of_files_is_on_a_volume(mounted: str) -> None:
    values: Document = {
        "settings.files.storage": "/files",
        "ingressPods.extraVolumes": [{"name": "files", "emptyDir": {}}],
        "ingressPods.extraVolumeMounts": [{"name": "files", "mountPath": mounted}],
    }
    assert documents(merged(stage_values("multi-node"), values))


@each("endpoint, port", [("http://otel:4318/v1/traces", 4318), ("https://otel/v1/traces", 443)])
def test_traces_may_only_leave_for_the_collector(endpoint: str, port: int) -> None:
    collector = {"namespaceSelector": {"matchLabels": {"team": "observability"}}}
    values: Document = {
        "settings.telemetry.traces_endpoint": endpoint,
        "networkPolicy.tracesTo": [collector],
    }
    objects = documents(merged(stage_values("multi-node"), values))
    policy = one(objects, "NetworkPolicy", "hermes-ray")
    assert {"to": [collector], "ports": [{"port": port}]} in policy["spec"]["egress"]


@each("webhooks", [{"hosts": ["a.example.com"], "secret": "env:S"}, {}])
def test_webhooks_may_leave_for_their_receivers_if_there_are_any(webhooks: Document) -> None:
    values: Document = {"settings.webhooks": webhooks}
    objects = documents(merged(stage_values("multi-node"), values))
    policy = one(objects, "NetworkPolicy", "hermes-ray")
    anywhere = [rule for rule in policy["spec"]["egress"] if "ports" not in rule]
    blocks = [peer["ipBlock"] for rule in anywhere for peer in rule["to"] if "ipBlock" in peer]
    assert [block["cidr"] for block in blocks] == (["0.0.0.0/0"] if webhooks else [])
    assert all("10.0.0.0/8" in block["except"] for block in blocks)
