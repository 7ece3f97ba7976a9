"""The base class of every section of the settings tree."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

NAMESPACE = r"^[A-Za-z0-9_.-]+$"
RESOURCE = r"^[A-Za-z0-9_]*$"
MODEL_NAME = r"^[^\p{Z}\p{Cc}\p{Cf}:]+$"
MODEL_SOURCE = r"^(/[^\p{Cc}]*|[^./~\p{Z}\p{Cc}][^\p{Z}\p{Cc}]*)$"
ENDPOINT = r"^(https?://[^\p{Z}\p{Cc}]+)?$"
ORIGIN = r"^(\*|https?://[^/\p{Z}\p{Cc}]+)$"

LARGEST = 2**53
"""Up to here every number of YAML and JSON is exact; the chart's YAML has no larger ones."""

FORMS = {
    NAMESPACE: "takes letters, digits, '_', '.' and '-'",
    RESOURCE: "takes letters, digits and '_'",
    MODEL_NAME: "takes no spaces and no ':'",
    MODEL_SOURCE: "takes a folder by its full path, a hub id (organisation/model) or builtin:tiny",
    ENDPOINT: "takes a URL such as http://collector:4318/v1/traces",
    ORIGIN: "takes '*' and origins such as https://chat.example.com",
}
"""What each pattern of the tree means. The chart checks the same patterns, with Go's syntax."""


def _bounded(schema: dict[str, Any]) -> None:
    """Adds the largest number to a section's schema, for whoever checks only that."""
    for setting in schema.get("properties", {}).values():
        for node in (setting, *setting.get("anyOf", ()), setting.get("additionalProperties")):
            is_number = isinstance(node, dict) and node.get("type") in ("integer", "number")
            if is_number and "exclusiveMaximum" not in node:
                node.setdefault("maximum", LARGEST)


class Section(BaseModel):
    """A section of the tree. It is immutable, and an unknown setting is an error. Infinity, which
    YAML writes `.inf`, is refused: such a weight would turn the counters of all tenants into NaN.

    Types are those of JSON, as in the chart's schema: no text is a number, but 2.0 is 2.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        strict=True,
        json_schema_extra=_bounded,
    )

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for key, value in given.items():
            for name, number in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(number, int | float) and LARGEST < abs(number) < float("inf"):
                    path = f"{key}.{name}".rstrip(".")
                    raise ValueError(f"{path} takes no number beyond {LARGEST:,}")
        return {
            key: int(value) if isinstance(value, float) and value.is_integer() else value
            for key, value in given.items()
        }
