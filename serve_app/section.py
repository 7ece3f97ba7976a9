"""What every part of the settings tree is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A node of the tree: immutable, and an unknown key is an error, not a comment."""

    model_config = ConfigDict(frozen=True, extra="forbid")
