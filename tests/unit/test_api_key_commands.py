"""The commands that edit a keys file."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from serve_app.cli.main import app
from serve_app.ingress.api_keys import key_id_of, parse

NOWHERE = ("--redis", "redis://127.0.0.1:1/0")


def hermes(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["api-key", *map(str, words)], prog_name="hermes-serve")


def created(*words: str | Path) -> bytes:
    """The SHA-256 of a key that is made, which is shown once and alone."""
    done = hermes("create", *words)
    assert done.exit_code == 0, done.stderr
    return hashlib.sha256(done.stdout.strip().encode()).digest()


def test_a_key_is_created_listed_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    plain = created("acme", "--file", file)
    expires = "2027-01-31T00:00:00Z"
    named = created(
        "acme",
        "--file",
        file,
        "--name",
        "ci",
        "--expires",
        expires,
        "--role",
        "admin",
        "--role",
        "metrics",
    )
    file.chmod(0o640)
    wanted = [
        {
            "key": key_id_of(plain),
            "tenant": "acme",
            "name": "",
            "roles": "inference",
            "expires": "",
        },
        {
            "key": key_id_of(named),
            "tenant": "acme",
            "name": "ci",
            "roles": "admin metrics",
            "expires": expires,
        },
    ]
    listed = hermes("list", "--file", file, "--json").stdout.splitlines()
    assert [json.loads(line) for line in listed] == [{**one, "last_used": ""} for one in wanted]
    table = hermes("list", "--file", file).stdout
    assert key_id_of(named) in table
    assert expires in table

    done = hermes("revoke", key_id_of(plain), "--file", file, *NOWHERE)
    assert done.exit_code == 1
    assert "Redis was not told" in done.stderr
    assert [*parse(file.read_text()).keys] == [named], "the file is changed nevertheless"
    assert file.stat().st_mode & 0o777 == 0o640
    assert [one.name for one in tmp_path.iterdir()] == ["keys"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "keys").symlink_to(tmp_path / "there" / "keys")
    created("acme", "--file", tmp_path / "keys")
    assert (tmp_path / "keys").is_symlink()
    assert len(parse((tmp_path / "there" / "keys").read_text()).keys) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["create", "default", "--file", "keys"], "cannot be named 'default'"),
        (["create", "a", "--file", "keys", "--role", "root"], "'keys.1.roles.1'"),
        (["create", "a", "--file", "none/keys"], "cannot open .*none: No such file"),
        (["revoke", "key_0", "--file", "keys"], "cannot read .*keys: No such file"),
        (["list", "--file", "keys"], "cannot read .*keys: No such file"),
    ],
)
def test_a_failure_is_one_sentence_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = hermes(*words)
    assert done.exit_code == 1
    assert len(done.stderr.splitlines()) == 1
    assert re.search(said, done.stderr), done.stderr
    assert [*tmp_path.iterdir()] == []
