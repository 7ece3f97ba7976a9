"""The words and values that cross a process: each is defined in one place, as it is stored."""

from __future__ import annotations

import pytest

from serve_app.contract import (
    AttemptResult,
    CallResult,
    CompletionStats,
    EngineReport,
    IngressLease,
    Reason,
    State,
    WorkerLease,
)
from tests.tables import each


def test_a_word_of_a_newer_version_is_understood_as_a_failure() -> None:
    assert State("suspended") is State.FAILED
    assert Reason("out_of_budget") is Reason.INTERNAL


ANSWERS = [
    AttemptResult(CallResult.FENCED),
    AttemptResult(CallResult.ENDED),
    AttemptResult(CallResult.ENDED, CompletionStats(0, whole=False, begun=False)),
    AttemptResult(CallResult.FENCED, CompletionStats(7, whole=False, prompt_tokens=30)),
    AttemptResult(CallResult.ENDED, CompletionStats(7), "1764-1"),
]


@each("answer", ANSWERS)
def test_a_workers_answer_crosses_the_process(answer: AttemptResult) -> None:
    """Without a class that the other side may not have."""
    sent = answer.encode()
    assert type(sent) is str
    assert AttemptResult.decode(sent) == answer


def test_an_answer_of_another_version_is_understood() -> None:
    assert AttemptResult.decode("ended") == AttemptResult(CallResult.ENDED, None)
    newer = AttemptResult(CallResult.ENDED, CompletionStats(7)).encode() + "|more"
    assert AttemptResult.decode(newer) == AttemptResult(CallResult.ENDED, CompletionStats(7))
    for text in ("suspended", "ended|7", "ended|many|1|1|0"):
        with pytest.raises(ValueError):
            AttemptResult.decode(text)


@pytest.mark.parametrize(
    ("lease", "member"),
    [
        (
            IngressLease("SERVE_1", "session_2026", True, 3, 7, 2, 40, "a|model", 1764),
            "SERVE_1|session_2026|1|3|7||2|40|a:model|1764",
        ),
        (IngressLease("SERVE_1", "session_2026"), "SERVE_1|session_2026|0|0|0||0|0||0"),
        (WorkerLease("replica|with-a-bar", 16), "replica|with-a-bar|16"),
    ],
)
def test_a_lease_is_stored_as_it_always_was(lease: IngressLease | WorkerLease, member: str) -> None:
    assert lease.encode() == member
    assert type(lease).decode(member.encode()) == lease


def test_the_lease_of_an_ingress_of_another_version_is_understood() -> None:
    lease = IngressLease("SERVE_1", "session", True, 2, 3, 4, 5, "m", 6)
    assert IngressLease.decode(b"SERVE_1|session|1|2|3||4|5|m|6|more") == lease
    for member in (b"SERVE_1", b"SERVE_1|session|1|2|3||4|5|m"):
        with pytest.raises(ValueError):
            IngressLease.decode(member)


def test_the_report_of_an_engine_of_another_version_is_understood() -> None:
    report = EngineReport("e", 4096, 512, 7, 2, 1, 3)
    for member, model in {
        b"e|4096|512|7|2|1|3": "",
        b"e|4096|512|7|2|1|3|a:model": "a|model",
        b"e|4096|512|7|2|1|3|m|more": "m",
    }.items():
        assert EngineReport.decode(member) == report._replace(model=model)
    assert report._replace(model="a|model").encode() == "e|4096|512|7|2|1|3|a:model"


@pytest.mark.parametrize("member", [b"", b"name", b"name|", b"name|many", b"\xff|1"])
def test_a_lease_without_a_capacity_is_none_of_a_worker(member: bytes) -> None:
    with pytest.raises(ValueError):
        WorkerLease.decode(member)
