"""The schema of the chart's values: `.venv/bin/python helm/schema.py` writes
hermes-serve/values.schema.json, and beside it files/settings.json with what the service refuses in
words (patterns, names of vLLM), for templates/_validate.tpl.

Unknown values are refused everywhere, except in objects that Kubernetes or vLLM define. `settings`
comes from the service's own settings tree, without what the chart sets itself: the address of
Redis, the API keys, and on which pods replicas run. What values.yaml sets is required: it can be
missing only if somebody sets it to null, or if `helm upgrade --reuse-values` leaves it out.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
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
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
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


def closed(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


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
SCHEDULING = closed(
    nodeSelector=STRINGS,
    tolerations=listed(OPEN),
    affinity=OPEN,
    topologySpreadConstraints=listed(OPEN),
    priorityClassName=NAME,
    runtimeClassName=NAME,
)
POD = {"cpus": whole(1), "memory": MEMORY, "shmSize": MEMORY, "scheduling": SCHEDULING}

OURS: dict[str, Schema] = {
    "image": closed(**IMAGE, pullSecrets=listed(NAME)),
    "auth": closed(enabled=BOOL, existingSecret=NAME, keysKey=KEY, testKey=KEY, metricsKey=KEY),
    "hub": closed(access=BOOL, existingSecret=NAME, tokenKey=KEY),
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
            scheduling=SCHEDULING,
            exporter=closed(enabled=BOOL, passwordKey=KEY, image=closed(**IMAGE)),
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
    "head": closed(**POD),
    "ingressPods": closed(**POD, replicas=whole(1)),
    "engines": closed(**POD, gpus=whole(0, 16), gpuResource=text(r"^[-.a-z0-9]+/[-.a-z0-9]+$")),
    "autoscaler": closed(
        maxPods=whole(0, 1024), idleTimeoutSeconds=whole(1), cpus=NUMBER, memory=MEMORY
    ),
    "uninstall": closed(enabled=BOOL, timeoutSeconds=whole(10)),
    "cpuLimits": BOOL,
    "env": {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "propertyNames": {"pattern": r"^[A-Za-z_][A-Za-z0-9_]*$"},
    },
    "podAnnotations": STRINGS,
    "serviceAccount": closed(annotations=STRINGS),
    "podDisruptionBudgets": closed(enabled=BOOL),
    "networkPolicy": closed(
        enabled=BOOL,
        servingFrom=listed(OPEN),
        tracesTo=listed(OPEN),
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
        annotations=STRINGS,
    ),
    "httpRoute": closed(enabled=BOOL, hosts=listed(HOST), parentRefs=listed(OPEN)),
    "monitoring": closed(
        podMonitors=BOOL,
        interval=text(r"^[1-9][0-9]*(s|m)$"),
        labels=STRINGS,
        rules=closed(enabled=BOOL, runbookUrl=text(r"^(https?://.+)?$")),
        dashboard=closed(enabled=BOOL, labels=STRINGS),
    ),
    "tests": closed(timeoutSeconds=whole(10)),
    "global": OPEN,  # reserved by Helm
    # Of a chart that has this one as a dependency: what its `condition` and `tags` read.
    "enabled": BOOL,
    "tags": {"type": "object", "additionalProperties": BOOL},
}


def settings() -> Schema:
    """The service's settings tree, without titles and defaults: a setting that is not listed
    keeps the service's default.
    """
    sys.path.insert(0, str(ROOT))
    from serve_app.settings import Settings

    tree: Schema = _bare(Settings.model_json_schema())
    for section, keys in SET_BY_THE_CHART.items():
        properties = (tree["$defs"][section] if section else tree)["properties"]
        for key in keys:
            properties.pop(key, None)
    return tree


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
    from serve_app.settings.presets import PRESETS
    from serve_app.settings.sections import FORMS
    from serve_app.settings.workers import AutoscalingSettings

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
        **closed(**copy.deepcopy(OURS), settings=tree),
        "$defs": _used(sections, tree),
    }
    _require(document, yaml.safe_load(DEFAULTS.read_text()))
    return json.dumps(document, indent=1) + "\n"


def _require(node: Schema, defaults: dict[str, Any]) -> None:
    """Requires what has a default, in every object whose keys the chart knows."""
    if node.get("additionalProperties", False) is not False:
        return
    nodes = node.setdefault("properties", {})
    node["required"] = [
        key for key, default in defaults.items() if not _may_be_null(nodes.get(key, {}), default)
    ]
    for key in node["required"]:
        if isinstance(defaults[key], dict):
            _require(nodes.setdefault(key, {}), defaults[key])


def _may_be_null(node: Schema, default: Any) -> bool:
    """Whether templates take null for nothing, such as `podAnnotations:` with nothing below it."""
    return node == SCHEDULING or (default in ([], {}) and "$ref" not in node)


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
