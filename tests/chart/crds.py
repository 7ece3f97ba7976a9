"""Custom resources against the schemas of their CRDs, as an API server would check them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jsonschema
import yaml

from tests.chart.charts import Document, needed

FILES = {
    "RayService": "crds/ray.io_rayservices.yaml",
    "ServiceMonitor": "crds/servicemonitors.yaml",
    "PodMonitor": "crds/podmonitors.yaml",
    "PrometheusRule": "crds/prometheusrules.yaml",
}


def errors(document: Document) -> list[str]:
    """The errors that the API server would report."""
    crd_schema, validator = _schema(document["kind"], document["apiVersion"])
    whole = copy.deepcopy(document)
    _fill(whole, crd_schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(whole)]


@functools.cache
def _schema(kind: str, api_version: str) -> tuple[Document, Any]:
    crd = yaml.load(needed(FILES[kind]).read_text(), yaml.CSafeLoader)
    assert crd["spec"]["names"]["kind"] == kind
    group, version = api_version.split("/")
    assert crd["spec"]["group"] == group
    (found,) = [
        item for item in crd["spec"]["versions"] if item["name"] == version and item["served"]
    ]
    schema = found["schema"]["openAPIV3Schema"]
    closed = _closed(schema)
    closed["properties"] |= {
        "apiVersion": {"const": api_version},
        "kind": {"const": kind},
        "metadata": {},
    }
    return schema, jsonschema.Draft202012Validator(closed)


def _closed(schema: Any) -> Any:
    """A structural schema in JSON Schema's words: unknown keys, which a server would drop, are
    errors.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {
        key: _closed(value)
        for key, value in schema.items()
        if key not in ("properties", "default", "format")
    }
    if "properties" in schema:
        result["properties"] = {key: _closed(value) for key, value in schema["properties"].items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and not is_open:
        result["additionalProperties"] = False
    if schema.get("nullable") and "type" in schema:
        result["type"] = [schema["type"], "null"]
    return result


def _fill(node: Any, schema: Document) -> None:
    """Insert the schema's defaults for missing values."""
    if isinstance(node, dict):
        for key, sub in schema.get("properties", {}).items():
            if key not in node and "default" in sub:
                node[key] = copy.deepcopy(sub["default"])
            if key in node:
                _fill(node[key], sub)
        values = schema.get("additionalProperties")
        if isinstance(values, dict):
            for value in node.values():
                _fill(value, values)
    elif isinstance(node, list):
        for item in node:
            _fill(item, schema.get("items", {}))
