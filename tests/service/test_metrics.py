"""`/metrics`: one page for the whole application; `/healthz`, `/readyz`."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import httpx

from serve_app.local import ray_cluster
from tests.chart.test_monitoring import EXPRESSIONS
from tests.service.support import CHAT, Metrics, Running, together
from tests.waiting import until


def test_the_counts_add_up(service: Running) -> None:
    before = service.settled()
    tokens = [3 + n % 5 for n in range(40)]
    answers = together(
        [
            partial(service.ask, f"Number {n}", n, headers={"x-hermes-class": "realtime"})
            for n in tokens
        ]
    )
    prompt_tokens = sum(answer.json()["usage"]["prompt_tokens"] for answer in answers)
    wanted = {
        ("hermes_requests_admitted_total", "class", "realtime"): 40,
        ("hermes_requests_ended_total", "state", "completed"): 40,
        ("hermes_attempts_total", "kind", "first"): 40,
        ("hermes_attempts_total", "kind", "retry"): 0,
        ("hermes_queue_wait_time_seconds_count", "class", "realtime"): 40,
        ("hermes_batch_processing_time_seconds_count", "class", "realtime"): 40,
        ("hermes_time_to_first_token_seconds_count", "class", "realtime"): 40,
        ("hermes_end_to_end_time_seconds_count", "class", "realtime"): 40,
        ("hermes_tokens_total", "kind", "output"): sum(tokens),
        ("hermes_tokens_total", "kind", "prompt"): prompt_tokens,
        ("vllm:generation_tokens_total", "", ""): sum(tokens),
        ("vllm:prompt_tokens_total", "", ""): prompt_tokens,
    }

    def moved(page: Metrics) -> dict[tuple[str, str, str], float]:
        changes = {}
        for name, label, value in wanted:
            labels = {label: value} if label else {}
            changes[name, label, value] = page.total(name, **labels) - before.total(name, **labels)
        return changes

    after = service.settled()
    assert moved(after) == wanted
    # Between two outputs, which may hold several tokens.
    name = "hermes_inter_token_time_seconds_count"
    assert 0 < after.total(name) - before.total(name) <= sum(tokens) - 40


def test_health_and_readiness_are_told(service: Running) -> None:
    assert service.http.get("/healthz").json()["status"] == "ok"
    answer = until(
        "it is ready", lambda: found if (found := service.http.get("/readyz")).is_success else None
    )
    assert answer.json() == {
        "ready": True,
        "problem": None,
        "workers": 2,
        "workers_wanted": 2,
        "ingresses": 2,
        "ingresses_wanted": 2,
        "warnings": [],
    }


def test_the_dashboard_and_the_alerts_ask_for_what_is_on_the_live_pages(service: Running) -> None:
    service.ask(tokens=2)
    assert service.http.post(CHAT, json={}).status_code == 400  # refusals have a panel
    wanted = {
        name
        for _, text in EXPRESSIONS
        for name in re.findall(r"\b(?:hermes|ray)_\w+|\bvllm:\w+", text)
    }
    # This machine has no GPU, and this service no tenant with limits, no batch that is not over,
    # and no receiver of webhooks.
    elsewhere = "gpu|gram|limit_used|batches$|batch_(lines$|spare)|webhook"
    here = {name for name in wanted if not re.search(elsewhere, name)}
    assert len(wanted) - len(here) <= 11
    folder = ray_cluster.short_folder(Path(service.service.state_dir)) / "ray"
    (discovered,) = json.loads((folder / "prom_metrics_service_discovery.json").read_text())

    def on_no_page() -> set[str]:
        pages = [
            service.http.get("/metrics").text,
            *(httpx.get(f"http://{at}", timeout=60).text for at in discovered["targets"]),
        ]
        missing = here - {sample.name for page in pages for sample in Metrics(page).samples}
        print("on no page:", sorted(missing))
        return missing

    until("every name is on a page", lambda: not on_no_page())
