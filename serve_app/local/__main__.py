"""`scripts/quickstart` and `hermes-serve up`: a service on this machine.

Everything that it starts is private (Redis, Ray, the deployment), stores its state in one folder,
and is stopped by Ctrl-C or `--down`. The first run installs pinned packages into `.venv`; later
runs need no network.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_app.local import environment, preflight, surroundings
from serve_app.local.environment import CLUSTER, IS_CLONE

_OWN_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_", "RAY_TMPDIR", "RAY_SERVE_HAPROXY_", "TMPDIR")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=environment.COMMAND,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        help="port of the service on 127.0.0.1 (default %(default)s)",
    )
    parser.add_argument(
        "--model", help="a folder or a hub id (default: the tiny model that ships with the project)"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        help="engine replicas (default: 2; on GPUs as many as they can hold)",
    )
    parser.add_argument("--ingress-replicas", type=int, help="HTTP replicas (default: 2)")
    parser.add_argument(
        "--tensor-parallel-size", type=int, help="processes (CPU) or GPUs per replica (default: 1)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="what the engines run on (default: ask, if there is a GPU)",
    )
    parser.add_argument(
        "--engine",
        choices=("vllm", "simulated"),
        default="vllm",
        help="the engine; `simulated` loads no model, for dry runs",
    )
    parser.add_argument("--redis-url", help="use this Redis instead of a private one")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=_variable,
        help="set a variable for the service's processes, such as VLLM_LOGGING_LEVEL=DEBUG or "
        "HTTPS_PROXY=…; from your environment they get PATH, HOME, CUDA_*, NVIDIA_*, HF_* and "
        "similar, and nothing meant for another Ray, vLLM or proxy",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        type=_assignment,
        help="change a setting (docs/settings.md), such as order.claim_ahead=2 or "
        "engine.args.max_model_len=2048",
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=300.0,
        help="give up after this time without progress in downloading or loading (default "
        "%(default)g)",
    )
    parser.add_argument(
        "--detach", action="store_true", help="return when it is ready; stop it with --down"
    )
    parser.add_argument(
        "--down", action="store_true", help="stop what an earlier run started, and nothing else"
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=preflight.STATE_DIR,
        help="the folder for its Redis, its logs and what --down needs (default: "
        ".hermes/quickstart); give --down the same",
    )
    # The parent process has checked and installed everything.
    parser.add_argument("--prepared", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is no port: choose one from 1 to 65535")
    return int(text)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    if name.startswith(_OWN_VARIABLES):
        raise argparse.ArgumentTypeError(f"{name} is set by quickstart itself: remove it")
    return name, value


def _assignment(text: str) -> tuple[tuple[str, ...], object]:
    """A setting's name in parts, and its value: JSON, or else the text itself."""
    name, equals, value = text.partition("=")
    names = tuple(name.split("."))
    if not equals or not all(part.isidentifier() for part in names):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE, such as engine.kind=vllm")
    if names == ("redis", "url"):
        raise argparse.ArgumentTypeError("quickstart does not read redis.url: give --redis-url")
    try:
        return names, json.loads(value)
    except ValueError:
        return names, value


def main() -> int:
    """Run it; what the user has set wrongly and what the machine refuses is one line."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is closed, and would be the next file that is opened
            os.open(os.devnull, os.O_RDWR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale may not have every character
    try:
        return run(arguments())
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except RuntimeError as error:
        problem = str(error)
    print(f"  ✗ {problem}", file=sys.stderr)
    return 1


def run(options: argparse.Namespace) -> int:
    """Run preflight and environment with the system's Python, and the rest with `.venv`'s."""
    options.state_dir = options.state_dir.resolve()
    if options.down:
        return down(options.state_dir)
    if options.prepared:
        return up(options, options.device)
    environment.HOME.mkdir(parents=True, exist_ok=True)
    device = preflight.device(options.device)
    # A dry run needs no vLLM, so any installed set is enough.
    locks = environment.lock_files(
        "cpu" if options.engine == "simulated" else device, development=False
    )
    preflight.report(locks, device, options.redis_url)
    problems = preflight.problems(options.port, locks, options.state_dir)
    if device == "gpu" and not preflight.gpus():
        problems.append(
            "no NVIDIA GPU is to be seen (`nvidia-smi -L`, CUDA_VISIBLE_DEVICES): choose --device "
            "cpu"
        )
    if device == "cpu":
        engines = (
            0
            if options.engine == "simulated"
            else (options.replicas or 2) * (options.tensor_parallel_size or 1)
        )
        problems += filter(None, [preflight.memory_problem(engines)])
    problems = problems or list(filter(None, [preflight.take(options.state_dir)]))
    for problem in problems:
        print(f"  ✗ {problem}", file=sys.stderr)
    if problems:
        return 1
    environment.make_ready(locks)
    words = [*sys.argv[1:], "--device", device, "--prepared"]
    environment.go_on_as(str(environment.PYTHON), "serve_app.local", words)


def up(options: argparse.Namespace, device: str) -> int:
    """Start the service, print how to use it, and wait for Ctrl-C."""
    from serve_app.local import logs, ray_cluster, service, user_settings

    began = time.monotonic()
    surroundings.leave()
    config = CLUSTER / "local_cpu.yaml"
    gpus = preflight.gpus() if device == "gpu" else 0
    given = changes(options, device, gpus, preflight.sequences_of_gpu() if gpus else None)
    variables = dict(options.env)
    args = service.render(config, options.port, given)["applications"][0]["args"]
    if problem := preflight.take(options.state_dir) or user_settings.problem(
        args,
        variables,
        options.redis_url,
        own_arguments=any(names[:2] == ("engine", "args") for names, _ in options.settings),
    ):
        raise RuntimeError(problem)
    ray_cluster.use_token(options.state_dir / "ray-token")

    def tell(line: str) -> None:
        print(f"  {time.monotonic() - began:5.1f} s  {line}", flush=True)

    end_on_signals()
    running = None
    try:
        running = service.start(
            options.state_dir,
            config,
            options.port,
            given,
            redis_url=options.redis_url,
            environment=variables,
            tell=tell,
            timeout_s=options.timeout_s,
            place=ray_cluster.Place(cpus=ray_cluster.LOGICAL_CPUS + 2 * gpus, gpus=gpus),
        )
        tell("ready")
        chats = service.takes_chats(running.url, running.model)
        print(usage(running.url, running.model, options, chats), flush=True)
        if options.detach:
            return 0
        service.look_after(running, tell)
        if running.is_being_ended:
            running = None
            print("  stopped by --down", flush=True)
            return 0
        kept = logs.keep(options.state_dir, options.state_dir / "logs")
        print(f"  ✗ the service's Ray has ended; logs: {kept}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\n  stopping …", flush=True)
        return 0
    finally:
        if running is not None and not options.detach:
            running.down()


def end_on_signals() -> None:
    """End as with Ctrl-C when the terminal is closed (unless under nohup), or somebody kills us."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)


def changes(
    options: argparse.Namespace, device: str, gpus: int = 0, sequences: int | None = None
) -> dict[str, Any]:
    """The command line as settings that override `cluster/local_cpu.yaml`.

    Args:
        gpus: how many this machine has.
        sequences: how many one of them runs at a time, if more than any.
    """
    from serve_app.local.service import merged
    from serve_app.settings.sections import SEQUENCES_OF_A_GPU, WorkerSettings
    from serve_app.settings.tree import by_new_names

    args: dict[str, Any] = {"workers": {"device": device}, "engine": {"kind": options.engine}}
    # Two of them may share a Redis (--redis-url), and their folders' paths.
    args["service"] = f"{socket.gethostname()}:{options.state_dir}"
    args["files"] = {"storage": f"{options.state_dir}/files"}
    if device == "gpu":
        if options.engine == "vllm":
            args["engine"]["args"] = {"dtype": "auto", "enforce_eager": False}
        args["workers"]["replicas"] = max(1, gpus // max(1, options.tensor_parallel_size or 1))
        args["workers"]["engine_stall_timeout_s"] = WorkerSettings().engine_stall_timeout_s
        args["workers"]["max_running_requests"] = sequences or SEQUENCES_OF_A_GPU
    if options.model:
        there = Path(options.model).exists()
        source = str(Path(options.model).resolve()) if there else options.model
        args["model"] = {"name": re.sub(r"[\s:]+", "-", Path(source).name), "source": source}
        # The tiny model's settings may not suit yours: use the longest context that fits, and no
        # tool parser.
        ours = {"max_model_len": "auto", "enable_auto_tool_choice": False, "tool_call_parser": None}
        args["engine"]["args"] = {**args["engine"].get("args", {}), **ours}
    if options.replicas is not None:
        args["workers"]["replicas"] = options.replicas
    if options.tensor_parallel_size is not None:
        args["workers"]["tensor_parallel_size"] = options.tensor_parallel_size
    if options.ingress_replicas is not None:
        args["ingress"] = {"replicas": options.ingress_replicas}
    for names, value in options.settings:
        for name in reversed(names):
            value = {name: value}
        args = merged(args, by_new_names(value))
    return args


def down(state_dir: Path) -> int:
    if not environment.PYTHON.exists() or not (state_dir / "service.json").exists():
        print("  nothing to stop")
        return 0
    if Path(sys.prefix).resolve() != environment.VENV.resolve():
        environment.go_on_as(str(environment.PYTHON), "serve_app.local", sys.argv[1:])
    from serve_app.local.service import Service

    running = Service.load(state_dir)
    if running is not None:
        running.down()
    print("  ended")
    return 0


_CHAT = """\
  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{model}", "stream": true,
         "messages": [{{"role": "user", "content": "Tell me a story."}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  for chunk in client.chat.completions.create(model="{model}", stream=True,
          messages=[{{"role": "user", "content": "What is continuous batching?"}}]):
      print(chunk.choices[0].delta.content or "", end="", flush=True)
"""
_COMPLETION = """\
  Warning: this model has no chat template, so it completes text and answers no chat. With one of
  yours it does: --set engine.args.chat_template=/path/to/template.jinja

  curl -N {url}/v1/completions -H 'content-type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "max_tokens": 100, "prompt": "Once upon a time"}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  for chunk in client.completions.create(model="{model}", stream=True, max_tokens=100,
          prompt="Once upon a time"):
      print(chunk.choices[0].text, end="", flush=True)
"""


def usage(url: str, model: str, options: argparse.Namespace, chats: bool = True) -> str:
    """Example commands to print; `chats`: whether the model takes messages."""
    end = preflight.down_command(options.state_dir) if options.detach else "Ctrl-C"
    demo = "scripts/demo" if IS_CLONE else "hermes-serve demo"
    return f"""
  hermes-serve is ready on {url}   (docs: {url}/docs, metrics: {url}/metrics)

{(_CHAT if chats else _COMPLETION).format(url=url, model=model)}
  {end} ends it and everything it started.
  {demo} shows what it survives, on a service of its own.
"""


if __name__ == "__main__":
    sys.exit(main())
