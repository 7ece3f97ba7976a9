"""Settings of the journal."""

from __future__ import annotations

from pydantic import Field

from serve_app.settings.section import Section


class JournalSettings(Section):
    """How long a finished request can still be read."""

    retention_s: float = Field(
        900.0, gt=0, description="How long a request can still be read after it has ended"
    )
    transcript_compression_level: int = Field(
        1, ge=0, le=9, description="zlib level for finished answers; 0 stores them uncompressed"
    )
