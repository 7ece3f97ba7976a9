"""The roles in the documents allow what the command needs, and nothing else."""

from __future__ import annotations

import re

import pytest
import yaml

from scripts.chaos_testing.kubernetes import rights
from scripts.chaos_testing.kubernetes.options import NAMES
from scripts.local.environment import ROOT

pytestmark = pytest.mark.nightly  # a tool


def documented() -> set[tuple[str, str]]:
    """The rights that the roles of the document give, in the words of `rights`."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n([^`]*kind: Role\n[^`]*)```", page)
    return {
        (verb, f"{name}{f'.{group}' if group else ''}{_where(role['kind'], name)}")
        for role in yaml.safe_load_all(block)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for name in rule["resources"]
        for verb in rule["verbs"]
    }


def _where(kind: str, resource: str) -> str:
    return rights.EVERYWHERE if kind == "ClusterRole" and resource == "pods" else ""


def test_the_documents_roles_are_what_every_fault_but_the_upgrade_needs() -> None:
    assert documented() == set(rights.needed([name for name in NAMES if name != "upgrade"]))


def test_a_right_is_asked_for_where_it_is_needed() -> None:
    attributes = {
        right: rights._review(right, "prod")["spec"]["resourceAttributes"]
        for right in rights.needed(NAMES)
    }
    assert attributes["create", "pods/exec"] == {
        "namespace": "prod",
        "verb": "create",
        "group": "",
        "resource": "pods",
        "subresource": "exec",
    }
    assert attributes["list", "pods everywhere"]["namespace"] == ""
    assert attributes["patch", "nodes"]["namespace"] == ""
    assert attributes["patch", "rayservices.ray.io"]["group"] == "ray.io"
