"""Which of several Ray clusters in one namespace answers, and with whom an ingress shares."""

from __future__ import annotations

from serve_app.cluster.members import Members
from serve_app.contract import EngineReport, IngressLease
from tests.tables import each

EARLY, LATE = "session_2026-11-22_09-59-59_1_7", "session_2026-11-22_10-00-00_1_7"
"""Names that begin with a head's local time."""


ME = IngressLease("me", "c", model="m")


def lease(cluster: str, complete: bool = True, model: str = "m", since_ms: int = 0) -> IngressLease:
    name = f"ingress of {cluster} {model}"
    return IngressLease(name, cluster, complete, model=model, since_ms=since_ms)


@each(
    "early, late, answers",
    [
        (lease(EARLY), lease(LATE), LATE),
        (lease(EARLY), lease(LATE, complete=False), ""),
        (lease(EARLY, complete=False), lease(LATE), LATE),
        # a head whose local clock is behind, or whose summer has just ended
        (lease(EARLY, since_ms=2), lease(LATE, since_ms=1), EARLY),
        (lease(EARLY, since_ms=1), lease(LATE, since_ms=2), LATE),
        (lease(EARLY, since_ms=1), lease(LATE, since_ms=1), LATE),
        # another model
        (lease(EARLY, model="n"), lease(LATE), ""),
        (lease(EARLY), lease(LATE, model="n", since_ms=2), ""),
    ],
)
def test_the_newer_complete_cluster_of_a_model_answers(
    early: IngressLease, late: IngressLease, answers: str
) -> None:
    members = Members((early, late))
    for one in (early, late):
        newer = members.newer(one)
        assert newer == (answers if answers != one.cluster else "")


def test_the_newest_of_three_answers() -> None:
    three = [lease(name, since_ms=since) for since, name in enumerate("cab", start=1)]
    assert [Members((*three,)).newer(lease(name)) for name in "cab"] == ["b", "b", ""]


def test_only_ingresses_of_the_same_cluster_and_model_share_its_engines() -> None:
    same, other, elsewhere = lease("c"), lease("c", model="n"), lease("d")
    members = Members((same, other, elsewhere))
    assert members.others(ME) == [same]
    assert members.others(same) == []
    assert members.others(ME._replace(model="n")) == [other]
    assert members.of("m").ingresses == (same, elsewhere), "they fill the same queues"


@each(
    "leases, told",
    [
        ([lease("b", False)], "serves this model: both answer until the newer one is complete"),
        ([lease("b")], "serves this model: b answers new requests, this one only finishes its own"),
        (
            [lease("A")],
            "serves this model: this one answers new requests, that one only finishes its own",
        ),
        ([lease("b", model="n")], "serves another model, 'n': each answers its own requests"),
    ],
)
def test_each_tells_of_the_other_who_answers(leases: list[IngressLease], told: str) -> None:
    members = Members((lease("a"), *leases))
    (sentence,) = members.beside(lease("a"))
    assert sentence.startswith(f"another Ray cluster, {leases[0].cluster}, is in this namespace")
    assert told in sentence


def test_of_many_clusters_a_few_are_told() -> None:
    assert Members((lease("a"),)).beside(lease("a")) == []
    assert len(Members((*map(lease, "abcdefghij"),)).beside(lease("a"))) == 4


def test_engines_of_another_model_say_nothing_of_this_one() -> None:
    """Those of an older version do not say what they serve, and count."""
    own, old, other = (EngineReport("e", 9, 9, model=model) for model in ("m", "", "n"))
    assert Members(engines=(own, old, other)).of("m").engines == (own, old)
