"""Engines that can be simulated: a file of parameters for each."""

import json
from pathlib import Path

from serve_app.errors import SettingsError
from workers.engine_model.parameters import EngineParameters, decode_parameters

FOLDER = Path(__file__).parent / "engines"


def engine_names() -> list[str]:
    """The engines of this repository."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_engine(name: str) -> EngineParameters:
    """One of them, or a file of one's own.

    Raises:
        SettingsError: there is no such engine, or its file is wrong.
    """
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"no engine {name}: {error}. There are: {', '.join(engine_names())}"
        ) from None
    return decode_parameters(fields)
