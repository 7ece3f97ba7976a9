"""What a run has found: the table, and the same as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.chaos_testing.kubernetes.release import Release

DAMAGE = ("lost", "duplicated", "corrupted")
_SHOWN = 10


@dataclass(frozen=True)
class Row:
    """One fault. `result`: the client's account; `problem`: why the fault did not go as planned."""

    name: str
    what: str
    result: dict[str, Any]
    problem: str = ""

    @property
    def clean(self) -> bool:
        """Whether every text was whole, and the service came back."""
        return not self.problem and self.result["whole"] == self.result["all"]


def table(rows: Sequence[Row], left_out: Sequence[str], compared_with: str) -> str:
    """The table that the terminal shows."""
    width = max((len(row.what) for row in rows), default=4)
    lines = [f"{'what':<{width}}  {'whole':>9}  {'longest pause':>13}  {'reconnected':>11}"]
    for row in rows:
        found = row.result
        pause_s = found["longest_pause_s"]
        pause = "-" if pause_s is None else f"{pause_s:.1f} s"
        whole = f"{found['whole']}/{found['all']}"
        lines.append(f"{row.what:<{width}}  {whole:>9}  {pause:>13}  {found['reconnected']:>11}")
    counts = ", ".join(f"{kind} {sum(len(row.result[kind]) for row in rows)}" for kind in DAMAGE)
    failed = sum(sum(row.result["failed"].values()) for row in rows)
    lines += ["", f"{counts}, ended by an error {failed}"]
    if compared_with:
        lines.append(f"texts were compared with {compared_with}")
    for row in rows:
        lines += [f"  {row.name}: {row.problem}"] if row.problem else []
        for reason, count in row.result["failed"].items():
            lines.append(f"  {row.name}: {count} ended by {reason}")
        for kind in DAMAGE:
            lines += [f"  {row.name}: {kind}: {item}" for item in row.result[kind][:_SHOWN]]
    lines += [f"  left out: {sentence}" for sentence in left_out]
    return "\n".join(lines)


def as_json(
    release: Release, rows: Sequence[Row], left_out: Sequence[str], compared_with: str
) -> dict[str, Any]:
    """Every figure of the table, and the data behind it."""
    return {
        "release": release.name,
        "namespace": release.namespace,
        "chart": release.chart,
        "image": release.image,
        "compared_with": compared_with,
        "faults": [
            {"fault": row.name, "what": row.what, "problem": row.problem, **row.result}
            for row in rows
        ],
        "left_out": list(left_out),
    }
