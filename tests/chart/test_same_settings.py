"""Chart and service take the same settings: the service starts with whatever the chart lets
through, and the chart lets through what the service takes, unless its other values do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.errors import SettingsError
from serve_app.settings import load_settings
from serve_app.settings.vllm_names import WITH_MEANING, WITHOUT_MEANING
from tests.chart.charts import CHART, NAMED, Document, Loader, merged
from tests.chart.test_schema import SCHEMA

DEVICE: Document = {"settings.workers.device": "gpu"}
"""The chart's default, which is not the service's."""
OTHERS = re.compile(r"engines\.|ingressPods|weights|hub|networkPolicy|belong to Ray|YAML cannot")
"""What stands in a refusal by the chart that is about its other values, too, or about characters
that its own settings could not carry into the cluster."""
WORDS = st.text(max_size=8) | st.sampled_from(
    [
        "",
        "a/b",
        "/models/a b",
        "./a",
        "a b",
        "a:b",
        "3",
        "*",
        "http://h",
        "https://h:4318/v1",
        "1e3",
        "a\x7f",
        "\x85",
    ]
)
NUMBERS = st.integers(-2, 3) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
ANYTHING = st.none() | st.booleans() | NUMBERS | WORDS
VALUES = ANYTHING | st.lists(ANYTHING, max_size=2) | st.dictionaries(WORDS, ANYTHING, max_size=2)


def leaves(node: Document, path: str) -> Iterator[tuple[str, Document]]:
    """Every setting with its schema."""
    if "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    for choice in node.get("anyOf", ()):
        if "$ref" in choice:
            yield from leaves(choice, path)
    for name, setting in node.get("properties", {}).items():
        yield from leaves(setting, f"{path}.{name}")
    if "properties" not in node:
        yield path, node


def near(node: Document) -> list[Any]:
    """Values at a setting's bounds."""
    found: list[Any] = []
    for one in (node, *node.get("anyOf", ())):
        for name, bound in one.items():
            if name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                found += [bound, bound - 1, bound + 1, bound + 0.5, float(bound)]
            if name in ("minLength", "maxLength"):
                found += ["x" * bound, "x" * (bound + 1)]
        found += one.get("enum", ())
    return found


NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(1200)]
NAMES = sorted({*WITH_MEANING, *WITHOUT_MEANING, "chat-template", "max-model-len", "nonsense"})
ARGUMENTS = st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=2)
LEAVES = dict(leaves(SCHEMA["properties"]["settings"], "settings"))


@st.composite
def changes(draw: st.DrawFn) -> Document:
    """Some settings, at their bounds or of any kind."""
    paths = draw(st.lists(st.sampled_from(sorted(LEAVES)), min_size=1, max_size=2, unique=True))
    changed: Document = {}
    for path in paths:
        bounds = near(LEAVES[path])
        likely = ARGUMENTS if path.endswith(".engine.args") else VALUES
        changed[path] = draw(st.sampled_from(bounds) | likely if bounds else likely)
    return changed


def arguments(texts: dict[str, str]) -> Document:
    """The settings in the RayService of a rendered chart."""
    (text,) = (text for path, text in texts.items() if path.endswith("/rayservice.yaml"))
    config = yaml.load(text, Loader)["spec"]["serveConfigV2"]
    found: Document = yaml.load(config, Loader)["applications"][0]["args"]
    return found


def refused_by_the_service(args: Document) -> str:
    try:
        load_settings(args, {})
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=NIGHTLY)])
def test_chart_and_service_take_the_same_settings(examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(changes())
    def check(changed: Document) -> None:
        values, refused, texts = merged(NAMED, DEVICE, changed), "", {}
        try:
            chart = helm_python.Chart.load(str(CHART))
            texts = chart.render(values, name="hermes", namespace="prod")
        except helm_python.HelmError as error:
            refused = str(error)
        if not refused:
            assert refused_by_the_service(arguments(texts)) == "", changed
        elif not refused_by_the_service(values["settings"]):
            assert OTHERS.search(refused), (changed, refused)

    check()
