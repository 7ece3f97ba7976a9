"""`scripts/fetch-data` refuses files whose checksum differs, and brings again what was cut."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly  # a tool

ROOT = Path(__file__).parents[2]


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
        if item.derive is fetch.as_it_is:
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
