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

FORMS = {
    NAMESPACE: "takes letters, digits, '_', '.' and '-'",
    RESOURCE: "takes letters, digits and '_'",
    MODEL_NAME: "takes no spaces and no ':'",
    MODEL_SOURCE: "takes a folder by its full path, a hub id (organisation/model) or builtin:tiny",
    ENDPOINT: "takes a URL such as http://collector:4318/v1/traces",
    ORIGIN: "takes '*' and origins such as https://chat.example.com",
}
"""What each pattern of the tree means. The chart checks the same patterns, with Go's syntax."""


class Section(BaseModel):
    """A section of the tree. It is immutable, and an unknown setting is an error. Infinity, which
    YAML writes `.inf`, is refused: such a weight would turn the counters of all tenants into NaN.

    Types are those of JSON, as in the chart's schema: no text is a number, but 2.0 is 2.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            key: int(value) if isinstance(value, float) and value.is_integer() else value
            for key, value in given.items()
        }
