"""The schema of the chart's values: `.venv/bin/python helm/schema.py` writes
hermes-serve/values.schema.json, and beside it files/settings.json with what the service refuses in
words (patterns, names of vLLM), for templates/_validate.tpl.

Unknown values are refused everywhere, except in objects that vLLM defines. `settings` comes from
the service's own settings tree, without what the chart sets itself: the address of Redis, the API
keys, and on which pods replicas run. What values.yaml sets is required: it can be missing only if
somebody sets it to null, or if `helm upgrade --reuse-values` leaves it out. The descriptions are
the comments of values.yaml.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "helm" / "hermes-serve" / "values.schema.json"
DEFAULTS = FILE.with_name("values.yaml")
RULES = FILE.parent / "files" / "settings.json"
SET_BY_THE_CHART = {
    "": ("auth",),
    "RedisSettings": ("url", "ca_file"),
    "IngressSettings": ("ray_resource",),
    "WorkerSettings": ("ray_resource",),
}

NOT_KEPT = ("title", "default", "pattern")
"""Of a pattern Helm would show a regular expression; _validate.tpl says what it means."""

Schema = dict[str, Any]

BOOL: Schema = {"type": "boolean"}
OPEN: Schema = {"type": "object"}
NUMBER: Schema = {"type": "number", "exclusiveMinimum": 0}


def text(pattern: str = "", **more: Any) -> Schema:
    return {"type": "string", **({"pattern": pattern} if pattern else {}), **more}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def whole(minimum: int, maximum: int | None = None) -> Schema:
    return {
        "type": "integer",
        "minimum": minimum,
        **({} if maximum is None else {"maximum": maximum}),
    }


def listed(item: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": item, **more}


def closed(required: str = "", /, **properties: Schema) -> Schema:
    """An object of these fields; `required` names those that must be there."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **({"required": required.split()} if required else {}),
    }


def or_null(schema: Schema) -> Schema:
    """Null, too: Helm passes it on where values.yaml has no default."""
    return {**schema, "type": [schema["type"], "null"]}


def strings(keys: str, values: str = "") -> Schema:
    """Texts by name; both may have a form. (Of `propertyNames` Helm would not say where.)"""
    return {
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {keys: text(values)},
    }


_QUALIFIED = (
    r"([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
)
NAME = text(r"^([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?)?$")  # the name of an object; may be empty
KEY = text(r"^[-._a-zA-Z0-9]{1,253}$")  # an entry of a Secret
SIZE = text(r"^[1-9][0-9]*(Mi|Gi|Ti)$")
MEMORY = text(r"^[1-9][0-9]*(Mi|Gi)$")
CIDR = text(r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")
HOST = text(r"^([*]\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
NAMESPACES = listed(text(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"), minItems=1)
PORTS = listed(whole(1, 65535), minItems=1)
PULL = one_of("Always", "IfNotPresent", "Never")
IMAGE = {
    "repository": text(),  # templates/_validate.tpl says what is wrong with one
    "tag": text(r"^([A-Za-z0-9_][-.A-Za-z0-9_]{0,127})?$"),
    "digest": text(r"^(sha256:[0-9a-f]{64})?$"),
    "pullPolicy": PULL,
}
LABELS = strings(
    rf"^{_QUALIFIED}$", r"^([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?$"
)  # values, too, have a form
ANNOTATIONS = strings(rf"^{_QUALIFIED}$")


def of_kubernetes(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _selecting(operators: Sequence[str]) -> Schema:
    """A requirement of labels or of nodes."""
    return closed("key operator", key=text(), operator=one_of(*operators), values=listed(text()))


def _affinity_of_pods() -> Schema:
    required = listed(of_kubernetes("PodAffinityTerm"))
    preferred = listed(
        closed(
            "weight podAffinityTerm",
            weight=whole(1, 100),
            podAffinityTerm=of_kubernetes("PodAffinityTerm"),
        )
    )
    return _scheduled(required, preferred)


def _scheduled(required: Schema, preferred: Schema) -> Schema:
    return closed(
        requiredDuringSchedulingIgnoredDuringExecution=required,
        preferredDuringSchedulingIgnoredDuringExecution=preferred,
    )


_SETS = ("In", "NotIn", "Exists", "DoesNotExist")
_HONOURED = one_of("Honor", "Ignore")
_IDS = {"runAsUser": whole(0), "runAsGroup": whole(0), "runAsNonRoot": BOOL}
_PROFILES = {
    "seLinuxOptions": closed(user=text(), role=text(), type=text(), level=text()),
    **{
        name: closed(
            "type",
            type=one_of("RuntimeDefault", "Localhost", "Unconfined"),
            localhostProfile=text(),
        )
        for name in ("seccompProfile", "appArmorProfile")
    },
}
KUBERNETES: dict[str, Schema] = {
    "LabelSelector": closed(matchLabels=LABELS, matchExpressions=listed(_selecting(_SETS))),
    "NodeSelectorTerm": closed(
        matchExpressions=listed(_selecting((*_SETS, "Gt", "Lt"))),
        matchFields=listed(_selecting((*_SETS, "Gt", "Lt"))),
    ),
    "PodAffinityTerm": closed(
        "topologyKey",
        topologyKey=text(),
        labelSelector=of_kubernetes("LabelSelector"),
        namespaceSelector=of_kubernetes("LabelSelector"),
        namespaces=listed(text()),
        matchLabelKeys=listed(text()),
        mismatchLabelKeys=listed(text()),
    ),
    "Affinity": closed(
        nodeAffinity=_scheduled(
            closed(
                "nodeSelectorTerms", nodeSelectorTerms=listed(of_kubernetes("NodeSelectorTerm"))
            ),
            listed(
                closed(
                    "weight preference",
                    weight=whole(1, 100),
                    preference=of_kubernetes("NodeSelectorTerm"),
                )
            ),
        ),
        podAffinity=_affinity_of_pods(),
        podAntiAffinity=_affinity_of_pods(),
    ),
    "Toleration": closed(
        key=text(),
        operator=one_of("Exists", "Equal", "Lt", "Gt"),
        value=text(),
        effect=one_of("", "NoSchedule", "PreferNoSchedule", "NoExecute"),
        tolerationSeconds={"type": "integer"},
    ),
    "TopologySpreadConstraint": closed(
        "maxSkew topologyKey whenUnsatisfiable",
        maxSkew=whole(1),
        minDomains=whole(1),
        topologyKey=text(),
        whenUnsatisfiable=one_of("DoNotSchedule", "ScheduleAnyway"),
        labelSelector=of_kubernetes("LabelSelector"),
        matchLabelKeys=listed(text()),
        nodeAffinityPolicy=_HONOURED,
        nodeTaintsPolicy=_HONOURED,
    ),
    "PodSecurityContext": closed(
        **_IDS,
        **_PROFILES,
        fsGroup=whole(0),
        fsGroupChangePolicy=one_of("OnRootMismatch", "Always"),
        supplementalGroups=listed(whole(0)),
        supplementalGroupsPolicy=one_of("Merge", "Strict"),
        seLinuxChangePolicy=one_of("Recursive", "MountOption"),
        sysctls=listed(closed("name value", name=text(), value=text())),
    ),
    "SecurityContext": closed(
        **_IDS,
        **_PROFILES,
        allowPrivilegeEscalation=BOOL,
        privileged=BOOL,
        procMount=one_of("Default", "Unmasked"),
        readOnlyRootFilesystem=BOOL,
        capabilities=closed(add=listed(text()), drop=listed(text())),
    ),
    "ResourceRequirements": closed(
        requests=OPEN,
        limits=OPEN,
        claims=listed(closed("name", name=text(), request=text())),
    ),
    "NetworkPolicyPeer": closed(
        ipBlock=closed("cidr", cidr=CIDR, **{"except": listed(CIDR)}),
        namespaceSelector=of_kubernetes("LabelSelector"),
        podSelector=of_kubernetes("LabelSelector"),
    ),
    "ParentReference": closed(
        "name",
        group=text(),
        kind=text(),
        name=text(),
        namespace=text(),
        port=whole(1, 65535),
        sectionName=text(),
    ),
}
"""Kubernetes' own types, with all their fields (those for Windows apart), so that a wrong one is
refused here and not by the API server, which the operator meets long after the install.
"""
for _name in ("Affinity", "PodSecurityContext", "ResourceRequirements", "SecurityContext"):
    KUBERNETES[_name] = or_null(KUBERNETES[_name])
_NAMED = or_null(listed({"type": "object", "required": ["name"]}))
PODS: dict[str, Schema] = {
    "podLabels": or_null(LABELS),
    "podAnnotations": or_null(ANNOTATIONS),
    "imagePullSecrets": or_null(listed(closed("name", name={**NAME, "minLength": 1}))),
    "nodeSelector": or_null(LABELS),
    "tolerations": or_null(listed(of_kubernetes("Toleration"))),
    "affinity": of_kubernetes("Affinity"),
    "topologySpreadConstraints": or_null(listed(of_kubernetes("TopologySpreadConstraint"))),
    "priorityClassName": or_null(NAME),
    "runtimeClassName": or_null(NAME),
    "podSecurityContext": of_kubernetes("PodSecurityContext"),
    "containerSecurityContext": of_kubernetes("SecurityContext"),
    "extraEnv": _NAMED,
    "extraEnvFrom": or_null(listed(OPEN)),
    "extraVolumes": _NAMED,
    "extraVolumeMounts": _NAMED,
    "initContainers": _NAMED,
    "extraContainers": _NAMED,
}
"""What every pod takes. Of containers and volumes the API server checks more."""
RESOURCES = {
    **of_kubernetes("ResourceRequirements"),
    "description": "Requests and limits of the pod's own container, over those of the chart.",
}


def own(*keys: str) -> dict[str, Schema]:
    """These keys of `PODS` for one pod or container, and its resources."""
    return {"resources": RESOURCES, **{key: {"$ref": f"#/properties/{key}"} for key in keys}}


POD = own(*PODS)
CONTAINER = own("extraEnv", "extraEnvFrom", "extraVolumeMounts", "containerSecurityContext")
SIZED = {
    **POD,
    "cpus": whole(1),
    "memory": MEMORY,
    "shmSize": MEMORY,
    "tmpSize": SIZE,
    "homeSize": SIZE,
}

OURS: dict[str, Schema] = {
    "model": text(),
    "image": closed(**IMAGE),
    "nameOverride": NAME,
    "fullnameOverride": NAME,
    "commonLabels": LABELS,
    "commonAnnotations": ANNOTATIONS,
    "auth": closed(enabled=BOOL, existingSecret=NAME, keysKey=KEY, testKey=KEY, metricsKey=KEY),
    "hub": closed(access=or_null(BOOL), existingSecret=NAME, tokenKey=KEY),
    "weights": closed(
        existingClaim=NAME,
        create=BOOL,
        size=SIZE,
        storageClassName=NAME,
        mountPath=text(r"^/[-._a-z0-9/]*[a-z0-9]$"),
        readOnly=BOOL,
        accessModes=listed(one_of("ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"), minItems=1),
    ),
    "redis": closed(
        internal=closed(
            enabled=BOOL,
            existingSecret=NAME,
            passwordKey=KEY,
            rayPasswordKey=KEY,
            image=closed(**IMAGE),
            appendfsync=one_of("everysec", "always"),
            maxmemory=text(r"^[1-9][0-9]*(mb|gb)$"),
            cpus=NUMBER,
            memory=MEMORY,
            persistence=closed(size=SIZE, storageClassName=NAME),
            **POD,
            exporter=closed(**CONTAINER, enabled=BOOL, passwordKey=KEY, image=closed(**IMAGE)),
        ),
        ha=closed(
            enabled=BOOL,
            name=NAME,
            replicas=whole(3, 9),
            primary=text(r"^[-.a-z0-9]+$"),
            existingSecret=NAME,
            passwordKey=KEY,
            rayPasswordKey=KEY,
            sentinelPasswordKey=KEY,
        ),
        external=closed(
            enabled=BOOL,
            existingSecret=NAME,
            urlKey=KEY,
            caKey=text(r"^[-._a-zA-Z0-9]{0,253}$"),
            gcsAddress=text(r"^((rediss?://)?[-.a-zA-Z0-9]+:[0-9]{1,5})?$"),
            gcsUsernameKey=KEY,
            gcsPasswordKey=KEY,
            cidrs=listed(CIDR),
            ports=PORTS,
        ),
    ),
    "rayAuth": closed(enabled=BOOL),
    "gcsFaultTolerance": closed(enabled=BOOL),
    "upgrade": closed(type=one_of("NewCluster", "None"), keepOldClusterSeconds=whole(0)),
    "drainSeconds": whole(0),
    "head": closed(**SIZED),
    "ingressPods": closed(**SIZED, replicas=whole(1)),
    "engines": closed(**SIZED, gpus=whole(0, 16), gpuResource=text(r"^[-.a-z0-9]+/[-.a-z0-9]+$")),
    "autoscaler": closed(
        **CONTAINER,
        maxPods=whole(0, 1024),
        idleTimeoutSeconds=whole(1),
        cpus=NUMBER,
        memory=MEMORY,
    ),
    "uninstall": closed(**POD, enabled=BOOL, timeoutSeconds=whole(10)),
    "cpuLimits": BOOL,
    "env": strings(r"^[A-Za-z_][A-Za-z0-9_]*$"),
    **PODS,
    "serviceAccount": closed(create=BOOL, name=NAME, annotations=ANNOTATIONS),
    "podDisruptionBudgets": closed(enabled=BOOL),
    "networkPolicy": closed(
        enabled=BOOL,
        servingFrom=listed(of_kubernetes("NetworkPolicyPeer")),
        storageTo=listed(of_kubernetes("NetworkPolicyPeer")),
        storagePorts=PORTS,
        tracesTo=listed(of_kubernetes("NetworkPolicyPeer")),
        webhooksTo=listed(of_kubernetes("NetworkPolicyPeer")),
        operatorNamespaces=NAMESPACES,
        monitoringNamespaces=NAMESPACES,
        dnsNamespaces=NAMESPACES,
        dnsCidrs=listed(CIDR),
        dnsPorts=PORTS,
        apiServerCidrs=listed(CIDR),
        apiServerPorts=PORTS,
        hubCidrs=listed(CIDR),
    ),
    "ingress": closed(
        enabled=BOOL,
        className=NAME,
        host={"anyOf": [HOST, {"const": ""}]},
        tlsSecret=NAME,
        annotations=ANNOTATIONS,
    ),
    "httpRoute": closed(
        enabled=BOOL, hosts=listed(HOST), parentRefs=listed(of_kubernetes("ParentReference"))
    ),
    "monitoring": closed(
        podMonitors=BOOL,
        interval=text(r"^[1-9][0-9]*(s|m)$"),
        labels=LABELS,
        rules=closed(enabled=BOOL, runbookUrl=text(r"^(https?://.+)?$")),
        dashboard=closed(enabled=BOOL, labels=LABELS),
    ),
    "tests": closed(**POD, timeoutSeconds=whole(10)),
    "global": {**OPEN, "description": "Reserved by Helm."},
    "enabled": {**BOOL, "description": "For the `condition` of a chart that depends on this one."},
    "tags": {
        "type": "object",
        "additionalProperties": BOOL,
        "description": "For the `tags` of a chart that depends on this one.",
    },
}


def settings() -> Schema:
    """The service's settings tree, without titles and defaults: a setting that is not listed
    keeps the service's default.
    """
    sys.path.insert(0, str(ROOT))
    from scripts.pages import docstrings
    from serve_app.settings import Settings
    from serve_app.settings.sections import Section
    from serve_app.settings.tree import RENAMED

    tree: Schema = _bare(Settings.model_json_schema())
    sections = {**tree["$defs"], Settings.__name__: tree}
    for one in Section.__subclasses__():
        if one.__name__ in sections:  # engines have sections of their own
            _explain(sections[one.__name__], docstrings(one))
    for section, keys in SET_BY_THE_CHART.items():
        properties = (tree["$defs"][section] if section else tree)["properties"]
        for key in keys:
            properties.pop(key, None)
    for section, names in RENAMED.items():
        its = tree["$defs"][tree["properties"][section]["$ref"].rsplit("/", 1)[-1]]["properties"]
        its |= {
            old: {**its[new], "deprecated": True, "description": f"Former name of {new}"}
            for old, new in names.items()
        }
    return tree


def _explain(section: Schema, texts: dict[str, str]) -> None:
    """Add the docstrings of a section's settings, and the largest number that any of them takes."""
    from serve_app.settings.sections import LARGEST

    for name, setting in section["properties"].items():
        if name in texts:
            setting["description"] = texts[name]
        if setting.get("additionalProperties") is True:
            setting["additionalProperties"] = {"minimum": -LARGEST, "maximum": LARGEST}
        for node in (setting, *setting.get("anyOf", ()), setting.get("additionalProperties")):
            is_number = isinstance(node, dict) and node.get("type") in ("integer", "number")
            if is_number and "exclusiveMaximum" not in node:
                node.setdefault("maximum", LARGEST)


def _bare(node: Any, of_names: bool = False) -> Any:
    if isinstance(node, list):
        return [_bare(item) for item in node]
    if isinstance(node, str):
        return " ".join(node.split())  # remove a docstring's line breaks
    if not isinstance(node, dict):
        return node
    kept = node if of_names else {k: v for k, v in node.items() if k not in NOT_KEPT}
    return {
        key: _bare(value, of_names=key in ("properties", "$defs") and not of_names)
        for key, value in kept.items()
    }


def rules() -> str:
    """What the templates check, as the file holds it."""
    sys.path.insert(0, str(ROOT))
    from serve_app.settings import Settings
    from serve_app.settings import vllm_names as vllm
    from serve_app.settings.sections import FORMS, AutoscalingSettings
    from serve_app.settings.tree import PRESETS, RENAMED

    tree = Settings.model_json_schema()

    def forms(node: Schema, path: str) -> Iterator[Schema]:
        if "$ref" in node:
            node = tree["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        pattern = node.get("pattern") or node.get("items", {}).get("pattern")
        if pattern:
            yield {"path": path, "pattern": pattern, "takes": FORMS[pattern]}
        for name, setting in node.get("properties", {}).items():
            yield from forms(setting, f"{path}.{name}")

    templates = [
        {"path": f".engine.args.{name}", "pattern": vllm.TEMPLATE, "takes": vllm.NO_TEMPLATE}
        for name in ("chat_template", "chat-template")
    ]
    document = {
        "forms": [*forms(tree, ""), *templates],
        "autoscaling": AutoscalingSettings().for_serve(),
        "presets": {name: one._asdict() for name, one in PRESETS.items()},
        "withoutMeaning": vllm.WITHOUT_MEANING,
        "withMeaning": sorted(vllm.WITH_MEANING),
        "variables": vllm.VARIABLES,
        "formerNames": RENAMED,
    }
    return json.dumps(document, indent=1) + "\n"


def schema() -> str:
    """The whole schema, as the file holds it."""
    tree = settings()
    sections = tree.pop("$defs")
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "Written by helm/schema.py.",
        "title": "Values of hermes-serve",
        **_described(closed(**copy.deepcopy(OURS), settings=tree), comments()),
        "$defs": {**KUBERNETES, **_used(sections, tree)},
    }
    _require(document, yaml.safe_load(DEFAULTS.read_text()))
    return json.dumps(document, indent=1) + "\n"


def comments() -> dict[str, str]:
    """What values.yaml says of each value: behind it, or else above it. By its path."""
    said: dict[str, str] = {}
    path: list[str] = []
    above: list[str] = []
    for line in DEFAULTS.read_text().splitlines():
        if absent := re.fullmatch(r"# (\w+): {}", line):  # a value without a default
            said[absent[1]] = " ".join(above)
        elif line.lstrip().startswith("#"):
            above.append(line.strip()[2:])
        else:
            if match := re.match(r"( *)([-\w./]+):.*?(?: # (.*))?$", line):
                path = [*path[: len(match[1]) // 2], match[2]]
                said[".".join(path)] = match[3] or " ".join(above)
            above = []
    return said


def _described(node: Schema, said: dict[str, str], path: str = "") -> Schema:
    described = {
        key: _described(value, said, f"{path}{key}.")
        for key, value in node.get("properties", {}).items()
    }
    text = said.get(path[:-1])
    return {
        **node,
        **({"properties": described} if described else {}),
        **({"description": text} if text and "description" not in node else {}),
    }


def _require(node: Schema, defaults: dict[str, Any]) -> None:
    """Requires what has a default, in every object whose keys the chart knows."""
    if node.get("additionalProperties", False) is not False or "patternProperties" in node:
        return
    nodes = node.setdefault("properties", {})
    node["required"] = [
        key
        for key, default in defaults.items()
        if not _may_be_null(key, nodes.get(key, {}), default)
    ]
    for key in node["required"]:
        if isinstance(defaults[key], dict):
            _require(nodes.setdefault(key, {}), defaults[key])


def _may_be_null(key: str, node: Schema, default: Any) -> bool:
    """Whether templates take null for nothing, such as `podAnnotations:` with nothing below it."""
    return key in PODS or default is None or (default in ([], {}) and "$ref" not in node)


def _used(sections: Schema, start: Schema) -> Schema:
    """The sections that are still referred to, when those that the chart sets have gone."""
    used: Schema = {}
    waiting = [json.dumps(start)]
    while waiting:
        node = waiting.pop()
        for name in sections:
            if f'"#/$defs/{name}"' in node and name not in used:
                used[name] = sections[name]
                waiting.append(json.dumps(sections[name]))
    return dict(sorted(used.items()))


if __name__ == "__main__":
    FILE.write_text(schema())
    RULES.write_text(rules())
