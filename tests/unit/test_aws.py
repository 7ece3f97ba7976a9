"""A machine on AWS fetches its secrets before it starts, and placeholders that must be filled in
are marked.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from serve_app.local.environment import ROOT


@pytest.mark.parametrize("missing", ["", "keys", "ray-token", "redis-url", "gcs-redis-password"])
def test_a_machine_on_aws_does_not_start_without_what_it_must_know(
    tmp_path: Path, missing: str
) -> None:
    store = tmp_path / "aws"
    store.write_text(f'#!/bin/sh\ntest "$6" != "/hermes/{missing}" && echo "a value of $6\'s"\n')
    store.chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    script = ROOT / "cluster" / "launch" / "aws-secrets"
    done = subprocess.run(
        [script, "eu-central-1"], env=own, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (not missing), done.stderr
    environment = tmp_path / ".hermes" / "environment"
    assert environment.exists() == (not missing)
    if not missing:
        read = f". {environment} && echo $HERMES_GCS_REDIS_PASSWORD, $RAY_AUTH_MODE"
        assert (
            subprocess.check_output(["bash", "-c", read], text=True)
            == "a value of /hermes/gcs-redis-password's, token\n"
        )
        files = [environment, tmp_path / ".ray" / "auth_token", tmp_path / ".hermes" / "keys"]
        assert [file.stat().st_mode & 0o077 for file in files] == [0, 0, 0]
