"""`scripts/dashboard-picture`: a service under load, a Prometheus that scrapes it, and every panel
of the dashboard.

The panels' own expressions are asked of a real Prometheus (`prometheus` on PATH) and drawn with
matplotlib in the dashboard's own grid, so the picture shows what an operator would see without a
Grafana at hand. Panels about what this machine has not (GPUs, the Redis exporter) say that they
have no data.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import yaml

from scripts.chaos_testing.parts import Parts
from scripts.local import ports, processes, ray_cluster, service, surroundings
from scripts.local.environment import ROOT

DASHBOARD = ROOT / "helm" / "hermes-serve" / "files" / "dashboard.json"
CLASSES = ("realtime", "standard", "standard", "batch")
TENANTS = ("acme", "acme", "acme", "bolt", "corp")
"""Of the users, in turn."""
SCRAPER = "@metrics"
SCRAPE_S = 2
RATE_INTERVAL = "20s"


def write_keys(file: Path) -> dict[str, str]:
    """A keys file with a key of each tenant and of the scraper; the keys."""
    keys = {name: secrets.token_urlsafe() for name in (*TENANTS, SCRAPER)}
    lines = (
        f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}" for name, key in keys.items()
    )
    file.write_text("\n".join(lines) + "\n")
    return keys


async def load(
    running: service.Service,
    keys: dict[str, str],
    users: int,
    seconds: float,
    after_half: Callable[[], object],
) -> None:
    """Conversations of several turns in all classes and of several tenants, and now and then a bad
    request; a fault in the middle.
    """
    model = running.model
    until_s = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=running.url, timeout=120) as http:

        async def user(number: int) -> None:
            chance = random.Random(number)
            while time.monotonic() < until_s:
                messages = [
                    {
                        "role": "user",
                        "content": f"User {number}: tell me of the sea, the harbour and the light.",
                    }
                ]
                headers = {
                    "authorization": f"Bearer {keys[TENANTS[number % len(TENANTS)]]}",
                    "x-session-id": f"s-{number}-{chance.random()}",
                    "x-hermes-class": chance.choice(CLASSES),
                }
                for _ in range(chance.randint(1, 4)):
                    named = model if chance.random() < 0.97 else "unknown"
                    body = {
                        "model": named,
                        "messages": messages,
                        "max_tokens": chance.randint(20, 160),
                    }
                    answer = await http.post("/v1/chat/completions", json=body, headers=headers)
                    if answer.is_success:
                        messages = [*messages, answer.json()["choices"][0]["message"], messages[0]]
                    await asyncio.sleep(chance.expovariate(2.0))

        async def fault() -> None:
            await asyncio.sleep(seconds / 2)
            after_half()

        await asyncio.gather(fault(), *(user(n) for n in range(users)))


def start_prometheus(folder: Path, running: service.Service, key: str) -> tuple[int, str]:
    """A Prometheus that scrapes the service's page and Ray's. Returns its pid and URL."""
    port = ports.free_port()
    ray = (
        ray_cluster.short_folder(Path(running.state_dir))
        / "ray"
        / "prom_metrics_service_discovery.json"
    )
    namespace = {"labels": {"namespace": "local"}}
    targets = [{"targets": [running.url.removeprefix("http://")], **namespace}]
    relabel = [{"target_label": "namespace", "replacement": "local"}]
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s"},
        "scrape_configs": [
            {
                "job_name": "hermes",
                "static_configs": targets,
                "authorization": {"credentials": key},
            },
            {
                "job_name": "ray",
                "file_sd_configs": [{"files": [str(ray)]}],
                "relabel_configs": relabel,
            },
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    log = (folder / "prometheus.log").open("w")
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/tsdb",
    ]
    process = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
    )
    return process.pid, f"http://127.0.0.1:{port}"


def ask(prometheus: str, expression: str, from_s: float, to_s: float) -> list[dict[str, Any]]:
    """The series of a panel's expression over a time."""
    for name, value in {"$namespace": ".*", "$__rate_interval": RATE_INTERVAL}.items():
        expression = expression.replace(name, value)
    asked: dict[str, str | float] = {
        "query": expression,
        "start": from_s,
        "end": to_s,
        "step": SCRAPE_S,
    }
    answer = httpx.get(f"{prometheus}/api/v1/query_range", params=asked, timeout=30).json()
    series: list[dict[str, Any]] = answer["data"]["result"]
    return series


def legend(template: str, labels: dict[str, str]) -> str:
    """Grafana's `{{label}}` templates."""
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template if "{{" not in template else " ".join(labels.values())


def draw(prometheus: str, from_s: float, to_s: float, picture: Path) -> int:
    """All panels in the dashboard's grid. Returns how many had data."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = json.loads(DASHBOARD.read_text())["panels"]
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    plt.style.use("dark_background")
    plt.rcParams.update(
        {"font.size": 6, "axes.facecolor": "#181b1f", "figure.facecolor": "#111217"}
    )
    figure = plt.figure(figsize=(19, height * 0.42), dpi=110)
    full = 0
    for panel in panels:
        box = panel["gridPos"]
        left, bottom = box["x"] / 24, 1 - (box["y"] + box["h"]) / height
        if panel["type"] == "row":
            figure.text(
                left + 0.005,
                bottom + 0.3 * box["h"] / height,
                panel["title"],
                size=11,
                weight="bold",
            )
            continue
        axes = figure.add_axes(
            (left + 0.025, bottom + 1.4 / height, box["w"] / 24 - 0.035, (box["h"] - 2.6) / height)
        )
        full += draw_panel(axes, panel, prometheus, from_s, to_s)
    figure.savefig(picture)
    return full


def draw_panel(
    axes: Any, panel: dict[str, Any], prometheus: str, from_s: float, to_s: float
) -> bool:
    """One panel; whether there was anything to draw."""
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    found = False
    for target in panel["targets"]:
        for series in ask(prometheus, target["expr"], from_s, to_s):
            points = [
                (float(at) - from_s, float(value))
                for at, value in series["values"]
                if value != "NaN"
            ]
            if points:
                found = True
                axes.plot(
                    *zip(*points, strict=True),
                    linewidth=1,
                    label=legend(target["legendFormat"], series["metric"]),
                )
    axes.set_title(f"{panel['title']}  [{unit}]" if unit else panel["title"], loc="left", size=8)
    axes.set_xlim(0, to_s - from_s)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.15)
    if found:
        axes.legend(loc="upper left", frameon=False, ncols=2)
    else:
        axes.text(
            0.5,
            0.5,
            "no data here",
            ha="center",
            va="center",
            transform=axes.transAxes,
            color="#888888",
        )
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="scripts/dashboard-picture", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="of load (5); in the middle a worker is killed"
    )
    parser.add_argument("--users", type=int, default=16, help="at a time (16)")
    parser.add_argument(
        "--picture", type=Path, default=ROOT / "docs" / "dashboard.png", help="where to"
    )
    options = parser.parse_args()
    surroundings.leave()
    if find_spec("matplotlib") is None:
        print(
            "scripts/dashboard-picture draws with matplotlib: run `scripts/test unit` once",
            file=sys.stderr,
        )
        return 2
    if shutil.which("prometheus") is None:
        print(
            "scripts/dashboard-picture needs `prometheus` on PATH (Debian: apt install prometheus)",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="picture-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        keys = write_keys(folder / "keys")
        args = {
            "auth": {"required": True, "keys_file": str(folder / "keys")},
            "workers": {"max_running_requests": 6},
            "telemetry": {"snapshot_period_s": 1.0},
        }
        config = ROOT / "cluster" / "local_cpu.yaml"
        running = service.start(
            folder / "s", config, ports.free_port(), args, tell=lambda line: print(f"  {line}")
        )
        prometheus_pid, prometheus = start_prometheus(folder, running, keys[SCRAPER])
        try:
            parts = Parts(running)
            from_s = time.time()
            seconds = options.minutes * 60
            kill = lambda: parts.kill(parts.pids("worker")[0])  # noqa: E731
            asyncio.run(load(running, keys, options.users, seconds, kill))
            full = draw(prometheus, from_s, time.time(), options.picture)
        finally:
            processes.end(prometheus_pid)
            running.down()
    print(f"{options.picture}: {full} panels with data")
    return 0


if __name__ == "__main__":
    sys.exit(main())
