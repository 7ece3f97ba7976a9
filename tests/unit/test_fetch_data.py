"""`scripts/fetch-data` refuses files whose checksum differs, and derives the pinned results."""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly  # a tool

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("HERMES_DATA", ROOT / ".hermes" / "data"))


def load() -> Any:
    loader = SourceFileLoader("fetch_data", str(ROOT / "scripts" / "fetch-data"))
    spec = spec_from_loader("fetch_data", loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["fetch_data"] = module  # dataclasses look their module up
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


fetch = load()


def test_what_does_not_match_its_checksum_is_refused_and_not_kept(tmp_path: Path) -> None:
    for item in fetch.ITEMS:
        if item.derive is fetch.as_it_is or item.source_sha256:
            with pytest.raises(fetch.Refused, match="checksum"):
                fetch.bring(item, tmp_path, lambda url: b"something else")
    assert list(tmp_path.rglob("*")) == []


def test_a_file_is_brought_again_only_if_it_was_cut(tmp_path: Path) -> None:
    item = fetch.Item("traces/a.txt", "https://nowhere.invalid", fetch.of_bytes(b"whole"))
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "a.txt").write_bytes(b"who")
    brought = [b"whole"]
    for expected in ("brought", "is there"):
        assert fetch.bring(item, tmp_path, lambda url: brought.pop()) == expected
        assert [path.read_bytes() for path in (tmp_path / "traces").iterdir()] == [b"whole"]


def needs(name: str) -> bytes:
    path = DATA / name
    if not path.exists():
        message = f"{path} is absent: scripts/fetch-data brings it (or set HERMES_DATA)"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    return path.read_bytes()


def test_the_traces_are_derived_from_their_source_to_the_byte() -> None:
    whole = needs("traces/mooncake_conversation_sessions.jsonl")
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    rows = [json.loads(line) for line in whole.splitlines()]
    source = "".join(
        json.dumps({name: row[name] for name in names}) + "\n" for row in rows
    ).encode()
    assert fetch.of_bytes(source) == fetch.MOONCAKE_SHA256
    for item in fetch.ITEMS:
        if item.url == fetch.MOONCAKE:
            assert fetch.of_bytes(item.derive(source)) == item.sha256
        elif item.derive is fetch.as_it_is:
            assert fetch.of_bytes(needs(item.path)) == item.sha256, item.path


def test_a_subset_of_openais_schema_reaches_all_that_it_names() -> None:
    item = next(item for item in fetch.ITEMS if item.derive is fetch.openai_subset)
    subset = needs(item.path)
    assert fetch.of_json(subset) == item.sha256
    with_more = json.loads(subset)
    with_more["paths"]["/something/else"] = {"get": {"responses": {}}}
    with_more["components"]["schemas"]["Unreached"] = {"type": "object"}
    assert fetch.of_json(fetch.openai_subset(json.dumps(with_more).encode())) == item.sha256
