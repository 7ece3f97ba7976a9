"""Validates Kubernetes' own kinds against its own schemas; unknown keys are refused.

The schemas are kubernetes-validate's. Its `validate` reads them again for every object, which takes
longer than all checks together, so here each schema is read once.
"""

from __future__ import annotations

import functools
import json
import re
from importlib.resources import files
from typing import Any

import jsonschema
from referencing import Registry, Resource

from tests.chart.charts import Document


@functools.cache
def _definitions(version: str) -> Any:
    return Resource.from_contents(_read(version, "_definitions")) @ Registry()


def fields(name: str, version: str) -> Document:
    """The fields of one of Kubernetes' types, such as `io.k8s.api.core.v1.Toleration`."""
    found: Document = _read(version, "_definitions")["$defs"][name]["properties"]
    return found


def _read(version: str, name: str) -> Document:
    folder = (
        files("kubernetes_validate") / "kubernetes-json-schema" / f"v{_whole(version)}-local-strict"
    )
    content: Document = json.loads((folder / f"{name}.json").read_text())
    return content


def _whole(version: str) -> str:
    root = files("kubernetes_validate") / "kubernetes-json-schema"
    (found,) = {
        item.name[1:].split("-")[0]
        for item in root.iterdir()
        if item.name.startswith(f"v{version}.")
    }
    return found


@functools.cache
def _validator(kind: str, api_version: str, version: str) -> Any:
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _read(version, f"{kind.lower()}-{group}")
    return jsonschema.Draft202012Validator(schema, registry=_definitions(version))


@functools.cache
def _errors(document: str, version: str) -> list[str]:
    item = json.loads(document)
    validator = _validator(item["kind"], item["apiVersion"], version)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(item)]


def errors(document: Document, version: str) -> list[str]:
    """The errors that an API server of that version would report. Each object is checked once."""
    return _errors(json.dumps(document, sort_keys=True), version)
