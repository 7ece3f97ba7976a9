"""Every setting of the application, as one frozen tree; docs/settings.md lists them.

`tree` combines the `sections`, and validates the settings in a Serve config file.
"""

from serve_app.settings.sections import (
    DEFAULT_TENANT,
    AuthSettings,
    RedisSettings,
    TelemetrySettings,
)
from serve_app.settings.tree import Settings, load_settings

__all__ = [
    "DEFAULT_TENANT",
    "AuthSettings",
    "RedisSettings",
    "Settings",
    "TelemetrySettings",
    "load_settings",
]
