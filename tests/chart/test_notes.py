"""What the chart says after an install: which Secrets it needs, and what stands open."""

from __future__ import annotations

from tests.chart.charts import NAMED, Document, merged, rendered
from tests.tables import each


def test_the_notes_name_every_secret() -> None:
    hub = merged(NAMED, {"hub.access": True, "hub.existingSecret": "hub"})
    notes = rendered(hub)["hermes-serve/templates/NOTES.txt"]
    for line in (
        "hermes-keys: keys, test-key",
        "hermes-redis: password, ray-password",
        "hub: token",
    ):
        assert line in notes


@each(
    "changes, sentence",
    [
        ({"auth.enabled": False}, "WARNING: auth.enabled is false."),
        ({"networkPolicy.enabled": False}, "WARNING: networkPolicy.enabled is false. Every pod"),
        (
            {"networkPolicy.enabled": False, "rayAuth.enabled": False},
            "Ray runs whatever code it is sent",
        ),
    ],
)
def test_the_notes_warn_of_what_stands_open(changes: Document, sentence: str) -> None:
    assert sentence in rendered(merged(NAMED, changes))["hermes-serve/templates/NOTES.txt"]
    assert sentence not in rendered(NAMED)["hermes-serve/templates/NOTES.txt"]
