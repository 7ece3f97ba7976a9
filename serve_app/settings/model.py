"""Settings of the served model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pydantic import Field

from serve_app.errors import SettingsError
from serve_app.settings.section import MODEL_NAME, MODEL_SOURCE, Section

BUILTIN_MODELS = {"builtin:tiny": ("workers", "tiny_model")}
"""Models that ship with the project, as package and folder."""


class ModelSettings(Section):
    """The served model: `name` for clients, `source` for the engine (a path or a hub id)."""

    name: str = Field(
        "hermes-tiny",
        min_length=1,
        max_length=128,
        pattern=MODEL_NAME,
        description="Name by which clients request the model",
    )
    source: str = Field(
        "builtin:tiny",
        pattern=MODEL_SOURCE,
        description="Folder or hub id of the model, or `builtin:tiny` for the model that ships "
        "with the project",
    )

    @property
    def path(self) -> str:
        """What the engine loads: a folder or a hub id. A built-in model is in the folder of its
        package.
        """
        if self.source not in BUILTIN_MODELS:
            return self.source
        package, folder = BUILTIN_MODELS[self.source]
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SettingsError(
                f"settings: model.source is '{self.source}', but '{package}' is not installed here"
            )
        return str(Path(spec.submodule_search_locations[0]) / folder)
