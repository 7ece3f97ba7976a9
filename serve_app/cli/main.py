"""`hermes-serve`: the commands for operators. In a clone, `scripts/` has each of them, too."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli import api_key, check_redis, dead_letters, deploy_code, requests, usage
from serve_app.cli.console import fail, new_app

app = new_app("Operate hermes-serve, an OpenAI-compatible LLM service.")
app.add_typer(deploy_code.app)
app.add_typer(usage.app)
app.add_typer(requests.app, name="requests")
app.add_typer(dead_letters.app, name="dead-letters")


@app.command("api-key", help=api_key.HELP)
def make_api_key(
    tenant: Annotated[str, typer.Argument(help="the tenant that the key belongs to")] = "",
    metrics: Annotated[
        bool, typer.Option("--metrics", help="create a key that opens /metrics and nothing else")
    ] = False,
) -> None:
    """Print a new key to standard error and its line for the keys file to standard output."""
    try:
        api_key.show(api_key.METRICS if metrics and not tenant else tenant)
    except ValueError as error:
        fail(str(error))


@app.command("check-redis", help=check_redis.HELP)
def check_redis_command(
    namespace: Annotated[str, typer.Option(help="namespace of the service in Redis")] = "hermes",
    service: Annotated[
        str, typer.Option(help="its name: a namespace of another one's is not to be used")
    ] = "",
    ca_file: Annotated[
        str, typer.Option(help="for rediss://: CA certificates to trust instead of the system's")
    ] = "",
    wait_s: Annotated[float, typer.Option(help="how long to wait for what may pass")] = 60.0,
    max_body_bytes: Annotated[
        int, typer.Option(help="ingress.max_body_bytes of the service: Redis has to take so much")
    ] = check_redis.MAX_BODY_BYTES,
) -> None:
    """Wait for Redis, or say what is wrong with it."""
    sentence = check_redis.wait_for_redis(namespace, service, ca_file, wait_s, max_body_bytes)
    if sentence:
        fail(sentence)


def main() -> None:
    app(prog_name="hermes-serve")


if __name__ == "__main__":
    main()
