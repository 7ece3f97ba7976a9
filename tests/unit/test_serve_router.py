"""Ray Serve's routers as Serve makes them, one for each deployment; without a cluster."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter

from serve_app.cluster import replicas as of_process
from serve_app.cluster.serve_router import OVERRIDDEN, SessionRouter
from serve_app.contract import Cause
from serve_app.deploy import _READ_AHEAD, _REPLACED, _BoundedReceive, _worker_options, build
from serve_app.errors import SettingsError
from serve_app.settings import Settings
from tests.tables import each
from tests.waiting import eventually


class Told:
    """What Serve tells of a replica, and what a router keeps of it."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DeploymentID("engines", "app"))

    def update_replica_info(self, told: Told) -> None:
        """Serve's router calls this for a replica that it knows."""

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def router(deployment: str, ask: Callable[[Told], Any] | None = None) -> SessionRouter:
    """As Serve creates it in an ingress, with the arguments that the application gives it. `ask`
    stands for the GCS: it makes of what Serve tells of a replica what can be called.
    """
    config: RequestRouterConfig = _worker_options(Settings())["request_router_config"]
    made: SessionRouter = config.get_request_router_class()(
        deployment_id=DeploymentID(deployment, "app"),
        handle_source=DeploymentHandleSource.REPLICA,
        create_replica_wrapper_func=ask,
    )
    made.initialize_state(**config.request_router_kwargs)
    return made


async def test_a_router_tells_the_replicas_of_its_own_deployment_and_of_no_other() -> None:
    losses: list[tuple[str, str]] = []
    for name in ("engines-1", "engines-2"):
        replicas = of_process.of(name)
        replicas.serving([f"{name}-a"])
        replicas.place("key", 1, lambda cause, name=name: losses.append((f"on-{name}", cause)))  # type: ignore[misc]
    one, _ = router("engines-1"), router("engines-2")
    one._by_name = {"engines-1-a": ReplicaID("engines-1-a", one._deployment_id)}
    one.update_replicas([])
    assert losses == [("on-engines-1", Cause.DRAINED)]
    assert of_process.of("engines-2").able() == {"engines-2-a"}


async def test_a_gcs_that_does_not_answer_holds_no_request_up() -> None:
    """Serve's own router asks for each new replica on the event loop of all requests."""

    answers, askers = threading.Event(), set[int]()

    def ask(told: Told) -> Told:
        askers.add(threading.get_ident())
        assert answers.wait(120)
        return told

    one = router("engines-3", ask)
    able = of_process.of("engines-3").able
    answers.set()
    one._update_running_replicas([Told("a"), Told("b")])
    await eventually(lambda: able() == {"a", "b"})
    answers.clear()
    one._update_running_replicas([Told("a"), Told("c")])
    assert able() == {"a"}, "what has gone is known at once"
    one._update_running_replicas([Told("a"), Told("d")])
    answers.set()
    await eventually(lambda: able() == {"a", "d"})
    assert threading.get_ident() not in askers, "the loop waits for no answer"


async def test_a_gcs_that_fails_is_asked_again_and_a_replica_that_is_dead_is_not() -> None:
    failures = [TimeoutError("no GCS"), ConnectionError("no GCS")]

    def ask(told: Told) -> Told:
        if failures:
            raise failures.pop()
        if told.replica_id.unique_id == "dead":
            raise ValueError("no such actor")
        return told

    one = router("engines-4", ask)
    one.ask_again_s = 0.01
    one._update_running_replicas([Told("a"), Told("dead")])
    await eventually(lambda: of_process.of("engines-4").able() == {"a"})
    assert not failures


async def test_a_call_goes_to_the_replica_that_it_names_while_serve_has_it() -> None:
    one = router("engines-5", lambda told: told)
    one._update_running_replicas([Told("a"), Told("b")])
    await eventually(lambda: len(one.curr_replicas) == 2)
    for name, found in (("b", ["b"]), ("a", ["a"]), ("gone", [])):
        call: Any = SimpleNamespace(args=["req_1", 1, name, ""], routing_context=SimpleNamespace())
        chosen = await one.choose_replicas([], call)
        assert [replica.replica_id.unique_id for (replica,) in chosen] == found
        assert call.routing_context.should_backoff


def test_an_ingress_of_a_version_whose_modules_have_other_names_can_load_the_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During an upgrade Serve sends the new router's class to the old ingresses. If loading it
    raised, Serve (2.60) would never again tell them which replicas run.
    """
    config: RequestRouterConfig = _worker_options(Settings())["request_router_config"]
    for name in [name for name in sys.modules if name.split(".")[0] == "serve_app"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert config.get_request_router_class().__name__ == "SessionRouter"


REPLACED = [*((RequestRouter, name) for name in OVERRIDDEN), *_REPLACED]


@each("owner, name", REPLACED)
def test_a_ray_without_what_is_replaced_is_refused_at_the_start(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.delattr(owner, name)
        with pytest.raises(SettingsError, match=rf"^Ray .* has no \S+\.{name}, which"):
            build({"engine": {"kind": "simulated"}})


def test_what_replaces_a_method_of_serves_is_on_that_list() -> None:
    methods = {name for name, value in vars(SessionRouter).items() if inspect.isfunction(value)}
    assert methods & {*dir(RequestRouter)} <= {*OVERRIDDEN}


async def test_serve_reads_a_body_no_faster_than_it_is_taken() -> None:
    pieces = [{"type": "http.request", "body": b"%d" % n, "more_body": n < 29} for n in range(30)]
    messages = [*pieces, {"type": "http.disconnect"}]
    left = iter(messages)
    read: list[Any] = []

    async def receive() -> Any:
        read.append(next(left))
        return read[-1]

    proxy = _BoundedReceive({"type": "http"}, receive, asyncio.get_running_loop())
    fetching = proxy.fetch_until_disconnect_task()
    for taken in range(20):
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(read) == taken + _READ_AHEAD + 1
        assert await proxy() == pieces[taken]
    assert [await proxy() for _ in range(11)] == messages[20:]
    await fetching
    assert await proxy() == messages[-1]
