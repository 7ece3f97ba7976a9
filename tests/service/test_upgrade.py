"""A new version of the code, by `serve deploy` and as a second Ray cluster that takes over, as with
the chart.

The next version writes journals that this one does not know, and reads this one's journals. Under
load, no client notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

import serve_app
from scripts.chaos_testing.parts import Parts
from scripts.chaos_testing.traffic import PROMPTS, Client, Told
from serve_app.cli import deploy_code, serve_api
from serve_app.local import ports, processes, redis_server
from serve_app.local import service as local
from serve_app.local.environment import ROOT
from serve_app.local.service import Service
from tests.chart.charts import documents, one, stage_values
from tests.service.batching import Batch
from tests.service.disturbance import (
    Towards,
    attempts,
    simulated_text,
    under,
    whole_again,
)
from tests.service.services import HELD, KEYS, Services, end, kill, let_in, limited
from tests.service.support import (
    Running,
    asking,
    events_of,
    of_tenant,
    replicas,
    text_of,
    text_of_chunks,
    together,
)
from tests.service.versions import FOLDER, PROMPT, TOKENS, read
from tests.waiting import until

pytestmark = [pytest.mark.disturbs, pytest.mark.timeout(1200)]
NEXT, ENGINE = "999.0.0", "simulated"
SHORT_TOKENS, ROLL_TOKENS, LONG_TOKENS = 120, 1800, 8000  # 3 s, 45 s, 200 s
LINES, LINE_TOKENS, STREAMS = 300, 150, 3


OTHER = os.environ.get("HERMES_OTHER_VERSION", "")
"""A whole checkout of another version, used instead of the made-up one:

HERMES_OTHER_VERSION=/tmp/other pytest tests/service/test_upgrade.py -k rolls_out
"""


def next_version(folder: Path) -> list[Path]:
    """The code of a version whose journals contain facts that this version does not know."""
    packages = [Path(OTHER or ROOT) / name for name in ("serve_app", "workers")]
    for package in packages:
        shutil.copytree(
            package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__")
        )
    of_app = folder / "serve_app" / "__init__.py"
    text = of_app.read_text()
    of_app.write_text(re.sub(r'(__version__ = )".*"', rf'\1"{NEXT}"', text))
    if not OTHER:
        _add_facts(folder / "serve_app" / "journal" / "entries.py")
        _rename_engine(folder / "workers" / "simulated_engine.py")
    return [folder / package.name for package in packages]


def _add_facts(path: Path) -> None:
    text = path.read_text()
    for fact in ('    trace: str = ""\n', '    fingerprint: str = ""\n'):
        assert text.count(fact) == 1
        text = text.replace(fact, f'{fact}    of_the_next: str = "new"\n')
    path.write_text(text)


def _rename_engine(path: Path) -> None:
    text, both = path.read_text(), f'    name = fingerprint = "{ENGINE}"\n'
    assert text.count(both) == 1
    # Its text is the same, so the engines of both versions continue each other's answers.
    path.write_text(text.replace(both, f'    name, fingerprint = "{ENGINE}-{NEXT}", "{ENGINE}"\n'))


def versions(url: str) -> set[str]:
    """The versions of the ingresses that answer there."""
    return {httpx.get(f"{url}/healthz", timeout=60).json()["version"] for _ in range(10)}


def answers_only(url: str, version: str) -> bool:
    """Whether every ingress that answers there has this version."""
    return versions(url) == {version}


# -- journals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_what_a_version_left_is_gone_on_with(simulated: Running, path: Path) -> None:
    left = read(path)
    running, completed = left["running"], left["completed"]
    for entries in (1, None):  # it only waited; it was in the middle of its stream
        running.put_back(simulated.redis, "acme", entries)
        until("it ends", lambda: simulated.state(running.request_id)["ended_at_ms"])
        assert text_of_events(simulated, running.request_id) == simulated_text(PROMPT, TOKENS)
        assert simulated.state(running.request_id)["attempts"] >= (1 if entries else 2)
    completed.put_back(simulated.redis, "acme")
    assert simulated.state(completed.request_id)["usage"]["output_tokens"] == TOKENS
    assert text_of_events(simulated, completed.request_id) == simulated_text(PROMPT, TOKENS)


def text_of_events(service: Running, request_id: str) -> str:
    """The text of a finished chat stream, replayed from its events."""
    return text_of(events_of(service.http.get(f"/v1/requests/{request_id}/events").text))


# -- serve deploy --------------------------------------------------------------------------------


class Beside:
    """What another tenant has under way beside the chats: a batch, and streams whose client does
    not connect again.
    """

    def __init__(self, service: Running, text: Callable[[str, int], str]) -> None:
        self._text, self._service = text, replace(service, tenant="zeta")
        self._pool = ThreadPoolExecutor(STREAMS)
        self._streams = {
            prompt: self._pool.submit(self._stream, prompt) for prompt in PROMPTS[:STREAMS]
        }
        prompts = {f"line-{number}": PROMPTS[number % len(PROMPTS)] for number in range(LINES)}
        self._batch = Batch(self._service, prompts, LINE_TOKENS)
        until("lines are done", lambda: self._batch.done())
        assert not any(one.done() for one in self._streams.values())

    def _stream(self, prompt: str) -> str:
        body = asking(prompt, ROLL_TOKENS, self._service.model, stream=True)
        with self._service.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            return text_of(events_of(answer.read().decode()))

    def check(self) -> None:
        """No stream was cut, and each line was answered once."""
        for prompt, stream in self._streams.items():
            assert stream.result() == self._text(prompt, ROLL_TOKENS)
        booked = STREAMS, STREAMS * ROLL_TOKENS
        self._batch.check(lambda prompt: self._text(prompt, LINE_TOKENS), 600, booked)
        self._pool.shutdown()


@pytest.mark.nightly  # a release property
def test_a_new_version_rolls_out_under_load_and_back(simulated: Running, tmp_path: Path) -> None:
    """And back; to a version that knows nothing of batches, with chats alone."""
    old = yaml.safe_load((Path(simulated.service.state_dir) / "serve.yaml").read_text())
    new = yaml.safe_load(yaml.safe_dump(old))
    dashboard, text = simulated.service.dashboard_url, simulated_text
    code = next_version(tmp_path)
    if not (has_batches := (code[0] / "batches").exists()):
        del new["applications"][0]["args"]["files"]
    deploy_code.with_code(new, dashboard, code)
    assert versions(simulated.url) == {serve_app.__version__}
    together([partial(text, prompt, LINE_TOKENS) for prompt in PROMPTS])
    for document, version in ((new, NEXT), (old, serve_app.__version__)):
        beside: list[Beside] = []

        async def strike(
            _: Parts,
            __: list[Told],
            document: dict[str, object] = document,
            beside: list[Beside] = beside,
        ) -> None:
            if has_batches:
                beside.append(await asyncio.to_thread(Beside, simulated, text))
            await asyncio.to_thread(serve_api.deploy, dashboard, document)

        told = under(simulated, strike, text, ROLL_TOKENS, count=12, silent_s=60)
        until(f"every ingress is {version}", partial(answers_only, simulated.url, version))
        # No connection breaks, so that any client will do. The clients of those that are not
        # streamed wait 60 s for an answer, then ask again.
        assert not any(one.breaks for one in told if one.streamed)
        assert max(attempts(told)) >= 2, "a stream that one version began, the other has ended"
        assert simulated.metrics().total("hermes_build_info", version=version) > 0
        for others in beside:
            others.check()
        whole_again(simulated, 3)


def running(service: Running, deployment: str) -> set[str]:
    """The ids of the running replicas."""
    found = replicas(service.service.dashboard_url, deployment)
    return {replica["replica_id"] for replica in found if replica["state"] == "RUNNING"}


@pytest.mark.nightly  # a release property
def test_scaling_by_serves_own_field_replaces_no_replica(simulated: Running) -> None:
    document = yaml.safe_load((Path(simulated.service.state_dir) / "serve.yaml").read_text())
    workers, ingresses = running(simulated, "Worker"), running(simulated, "Ingress")
    scaled = {"name": "Worker", "num_replicas": len(workers) + 1}
    try:
        document["applications"][0]["deployments"] = [scaled]
        serve_api.deploy(simulated.service.dashboard_url, document)
        until("there is one more", lambda: len(running(simulated, "Worker")) == len(workers) + 1)
        assert running(simulated, "Worker") > workers, "each session has its replica still"
        assert running(simulated, "Ingress") == ingresses
    finally:
        del document["applications"][0]["deployments"]
        serve_api.deploy(simulated.service.dashboard_url, document)
    until("it is gone", lambda: len(running(simulated, "Worker")) == len(workers))
    assert running(simulated, "Ingress") == ingresses


# -- the chart -----------------------------------------------------------------------------------


class Users:
    """OpenAI's own client without its retries, one stream after another."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._sdk = openai.AsyncOpenAI(
            base_url="http://service/v1",
            api_key=KEYS["acme"],
            max_retries=0,
            http_client=http,  # type: ignore[arg-type] # its types name `httpx2` alone
        )
        self._http = http
        self._model = model
        self.engines: list[str] = []
        """The engine of every answer, in order."""
        self._answers: Counter[int] = Counter()

    async def busy(self, number: int, stop: asyncio.Event) -> None:
        """Send requests until `stop`; every error is raised."""
        prompt = f"Short question {number}"
        while not stop.is_set():
            body = asking(prompt, SHORT_TOKENS, self._model, stream=True)
            create = self._sdk.chat.completions.with_streaming_response.create
            async with create(**body) as response:
                chunks = [chunk async for chunk in await response.parse()]
            assert text_of_chunks(chunks) == simulated_text(prompt, SHORT_TOKENS)
            self.engines.append(await self._engine(response.headers))
            self._answers[number] += 1

    async def _engine(self, headers: httpx.Headers) -> str:
        """Who has answered. The headers of a stream that waited went out before that was known."""
        if (engine := headers.get("x-hermes-engine")) is None:
            state = await self._http.get(f"/v1/requests/{headers['x-request-id']}")
            engine = state.json()["engine"]
        return str(engine)

    @contextlib.asynccontextmanager
    async def four(self) -> AsyncIterator[None]:
        """Four users until the block ends; an error of one ends the block."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                self._answers[number] = 0
                group.create_task(self.busy(number, stop))
            try:
                yield
            finally:
                stop.set()

    async def answer(self, each: int) -> None:
        """Wait until everybody has ended this many more streams."""
        goals = {number: count + each for number, count in self._answers.items()}
        while any(self._answers[number] < goal for number, goal in goals.items()):
            await asyncio.sleep(0.1)


class Release:
    """What `helm install` leads to, without Kubernetes: a Redis, and beside it one Ray cluster
    after another.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = folder / "serve.yaml"
        chart = documents(stage_values("cpu"))
        self._config.write_text(one(chart, "RayService")["spec"]["serveConfigV2"])
        keys = let_in(folder, "acme")
        wanted = {"auth": {"keys_file": str(keys)}, "ingress": {"replicas": 2}}
        self._args = local.merged(limited("simulated", outage=True), wanted)
        redis = redis_server.start(folder / "redis")
        self._redis_pid, self._redis_url = redis.pid, redis.url()
        self._clusters: list[Service] = []

    def cluster(
        self,
        name: str,
        code: Path = ROOT,
        tokens_per_s: int = 40,
        settings: dict[str, Any] | None = None,
        **more: Any,
    ) -> Service:
        """A Ray cluster that serves the release's `serveConfigV2`; `code`: in place of an image of
        another version; `settings`: other ones than the release's.
        """
        environment = {"PYTHONPATH": str(code)}
        args = local.merged(self._args, {"engine": {"args": {"tokens_per_s": tokens_per_s}}})
        args = local.merged(args, settings or {})
        state, more = self._folder / name, {"environment": environment, "timeout_s": 600, **more}
        port = ports.free_port()
        made = local.start(state, self._config, port, args, self._redis_url, **more)
        self._clusters.append(made)
        return made

    def end(self) -> None:
        for service in self._clusters:
            end(service)
        processes.end(self._redis_pid)


@pytest.fixture
def release(services: Services, tmp_path: Path) -> Iterator[Release]:
    services.end()  # memory is for one service, or for two simulated ones
    made = Release(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.nightly  # a release property
def test_a_release_is_upgraded_under_load(release: Release, tmp_path: Path) -> None:
    """Who asks when it is convenient sees no error; whose stream is longer than the old pods are
    kept, reconnects.
    """
    next_version(tmp_path / "next")
    old = release.cluster("old")
    told = [Told(PROMPTS[n], LONG_TOKENS, streamed=n % 3 != 2) for n in range(6)]

    async def upgrade() -> None:
        points_to = httpx.URL(old.url)
        service = Towards(lambda: points_to)
        timeout, headers = httpx.Timeout(120, pool=None), of_tenant(KEYS["acme"])
        async with httpx.AsyncClient(
            base_url="http://service", transport=service, timeout=timeout, headers=headers
        ) as http:
            users = Users(http, old.model)
            async with users.four():
                await users.answer(2)
                begun = asyncio.Event()
                loop = asyncio.get_running_loop()

                def tell(line: str) -> None:
                    if line.startswith("Serve: deploying"):
                        loop.call_soon_threadsafe(begun.set)

                # Its engines are faster: what the old ones leave is soon done.
                start = partial(release.cluster, "new", tmp_path / "next", 400, tell=tell)
                coming = asyncio.create_task(asyncio.to_thread(start))
                # Its engines are not there yet: what is asked now begins on the old ones.
                await begun.wait()
                client = Client(http, old.model)
                long = [asyncio.create_task(client.ask(one)) for one in told]
                new = await coming
                assert versions(old.url) | versions(new.url) == {serve_app.__version__, NEXT}
                await users.answer(1)
                points_to = httpx.URL(new.url)
                await users.answer(3)  # everybody's stream through the old pods has ended meanwhile
                switched = len(users.engines)
                await asyncio.to_thread(kill, old)
                await users.answer(5)
                # The old engines get nothing new.
                assert set(users.engines[switched - 4 :]) == {f"{ENGINE}-{NEXT}"}
                await asyncio.gather(*long)
                for asked in told:
                    asked.state = (await http.get(f"/v1/requests/{asked.request_id}")).json()

    asyncio.run(asyncio.wait_for(upgrade(), 1000))
    for asked in told:
        assert (asked.wrong, asked.failure) == ("", "")
        assert asked.text == simulated_text(asked.prompt, LONG_TOKENS)
    assert min(asked.breaks for asked in told) >= 1, "all of them were connected to the old pods"
    assert max(attempts(told)) >= 2, "some of them ran there"


# -- two clusters in one namespace ---------------------------------------------------------------


class Asked:
    """Requests to a cluster that go on without a client."""

    def __init__(self, service: Service) -> None:
        self.http = httpx.Client(base_url=service.url, headers=of_tenant(KEYS["acme"]), timeout=60)
        self._model = service.model

    def ask(self, prompt: str) -> str:
        """The id of a request."""
        body, headers = asking(prompt, 5, self._model), {"prefer": "respond-async"}
        answer = self.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 202
        return answer.headers["x-request-id"]

    def state(self, request_id: str) -> tuple[str, str]:
        found = self.http.get(f"/v1/requests/{request_id}").json()
        return found["state"], found["reason"] or ""

    def told(self) -> str:
        """What `/readyz` warns of."""
        return " ".join(self.http.get("/readyz").json()["warnings"])


@pytest.mark.nightly  # tests/journal/test_two_clusters.py shows each decision
def test_a_renamed_model_and_another_service_in_one_namespace(release: Release) -> None:
    few = {"workers": {"replicas": 1, "max_running_requests": 2}, "ingress": {"replicas": 1}}
    first = release.cluster("old", settings=few)
    old = Asked(first)
    held = [old.ask(f"{HELD} {number}") for number in range(2)]
    until("both run", lambda: {old.state(one)[0] for one in held} == {"running"})
    waits = [old.ask(f"Question {number}") for number in range(2)]

    renamed = local.merged(few, {"model": {"name": f"{first.model}-2"}})
    new = Asked(release.cluster("renamed", settings=renamed))
    until("each tells of the other", lambda: "another model" in old.told() and new.told())
    answered = new.ask("Hello")
    until("the new one answers", lambda: new.state(answered)[0] == "completed")
    assert {old.state(one)[0] for one in waits} == {"queued"}
    old.http.delete(f"/v1/requests/{held.pop()}").raise_for_status()
    until("the old one answers", lambda: {old.state(one)[0] for one in waits} == {"completed"})

    held.append(old.ask(f"{HELD} 3"))
    until("both run", lambda: {old.state(one)[0] for one in held} == {"running"})
    late = [*held, old.ask("Too late")]
    kill(first)
    gone = ("failed", "model_not_found")
    until("nothing waits for its deadline", lambda: {new.state(one) for one in late} == {gone})
    assert new.told() == ""

    another = local.merged(few, {"service": "another"})
    with pytest.raises(RuntimeError, match="belongs to the service"):
        release.cluster("another", settings=another, timeout_s=30)
    answered = new.ask("Hello")
    until("it is not disturbed", lambda: new.state(answered)[0] == "completed")
