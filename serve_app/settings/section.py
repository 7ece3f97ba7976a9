"""The base class of every section of the settings tree."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the tree. It is immutable, and an unknown setting is an error. Infinity, which
    YAML writes `.inf`, is refused: such a weight would turn the counters of all tenants into NaN.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
