"""Serves one model with Ray Serve LLM until it is ended.

It runs in the peer's own environment and imports nothing of this project. Its one argument is JSON:
model, source, port, engine.
"""

import json
import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app


def main() -> None:
    """Everything but the number of engine replicas is Ray Serve LLM's default."""
    wanted = json.loads(sys.argv[1])
    # The address comes from RAY_ADDRESS: always the head that the bench has started, never another.
    ray.init(log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": wanted["port"]})
    config = LLMConfig.model_validate(
        {
            "model_loading_config": {"model_id": wanted["model"], "model_source": wanted["source"]},
            "engine_kwargs": wanted["engine"],
            "accelerator_config": {"kind": "cpu"},
            "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        }
    )
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=True)


if __name__ == "__main__":
    main()
