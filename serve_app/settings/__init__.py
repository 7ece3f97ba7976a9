"""Every setting of the application, as one frozen tree; docs/settings.md lists them.

Each section has a file, and `tree` combines them. `loading` validates the settings in a Serve
config file.
"""

from serve_app.settings.auth import DEFAULT_TENANT, AuthSettings
from serve_app.settings.loading import load_settings
from serve_app.settings.redis import RedisSettings
from serve_app.settings.telemetry import TelemetrySettings
from serve_app.settings.tree import Settings

__all__ = [
    "DEFAULT_TENANT",
    "AuthSettings",
    "RedisSettings",
    "Settings",
    "TelemetrySettings",
    "load_settings",
]
