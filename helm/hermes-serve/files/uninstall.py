"""`helm uninstall`, before anything else goes: deletes the RayService and waits until KubeRay has
let it go, which is after the last of its Ray clusters. Until then KubeRay needs the release's Redis
and accounts. Standard library only.
"""

import http.client
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

FOLDER = os.environ.get("HERMES_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount")
NAMESPACE = os.environ["HERMES_NAMESPACE"]
NAME = os.environ["HERMES_RELEASE"]
LIMIT_S = float(os.environ["HERMES_TIMEOUT_SECONDS"])
DEADLINE = time.monotonic() + LIMIT_S
HOST = os.environ["KUBERNETES_SERVICE_HOST"]
API = f"https://{f'[{HOST}]' if ':' in HOST else HOST}:{os.environ['KUBERNETES_SERVICE_PORT']}"
TEST_POD = f"/api/v1/namespaces/{NAMESPACE}/pods/{NAME}-test"
SERVICE = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayservices/{NAME}"
TRUST = ssl.create_default_context(cafile=f"{FOLDER}/ca.crt")
POLL_S = 1.0  # one small answer of the API server each


def ask(method, path):
    """The object, or None if neither it nor its kind exists. Repeats what may pass."""
    while True:
        try:
            with open(f"{FOLDER}/token") as token:  # Kubernetes replaces it now and then
                headers = {"authorization": f"Bearer {token.read().strip()}"}
            request = urllib.request.Request(API + path, method=method, headers=headers)
            with urllib.request.urlopen(request, timeout=10, context=TRUST) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            why = f"the Kubernetes API answers {error.code}"
            if error.code in (401, 403):
                sys.exit(f"{method} {path}: {why}: {said(error)}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            values = "networkPolicy.apiServerCidrs, networkPolicy.apiServerPorts"
            why = f"{API} cannot be reached ({values}?): {error}"
        pause(f"{method} {path}: {why}")


def said(error):
    try:
        return json.load(error)["message"]
    except (ValueError, KeyError, TypeError):
        return error.reason


def pause(waiting_for):
    if time.monotonic() > DEADLINE:
        sys.exit(f"not done after {LIMIT_S:g} s: {waiting_for}")
    time.sleep(POLL_S)


def kept(service):
    finalizers = ", ".join(service["metadata"].get("finalizers", [])) or "nothing that it names"
    return (
        f"RayService {NAME} is being deleted, but {finalizers} still holds it. Is KubeRay's "
        f"operator running? Its log, and `kubectl describe raycluster -n {NAMESPACE}`, say what it "
        "waits for; then run helm uninstall again, or with --no-hooks"
    )


ask("DELETE", TEST_POD)  # Helm leaves the pod of a test that failed
ask("DELETE", SERVICE)
print(f"waiting until RayService {NAME} and its Ray clusters are gone", flush=True)
while service := ask("GET", SERVICE):
    pause(kept(service))
print(f"RayService {NAME} is gone")
