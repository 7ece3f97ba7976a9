"""hermes-serve. The path of a request, file by file:

ingress/app.py           HTTP in; ingress/keys.py: whose request; ingress/validation.py refuses what cannot work
ingress/admission.py     decides class, session, deadline; writes journal and queue entry: accepted
request_queue/queue.py   the waiting lines
dispatcher.py            claims when an engine has room; scheduling/order.py says which goes first
carrier.py               one request to its end: attempt after attempt, whoever dies
routing/ring.py          which replica; routing/serve_router.py tells Ray Serve
workers/replica.py       execute(request_id, epoch): reads the journal, runs the engine
workers/recorder.py      engine outputs and response bytes become entries
workers/replay.py        what older attempts have left; workers/seam.py goes on from there
journal/writer.py        fenced appends, group commit, wake-ups
journal/hub.py           followers; journal/reader.py: what an entry adds
ingress/answer.py        forwards the bytes to the client

journal/durability.py    notices a Redis that forgets what it accepted
deploy.py                puts it all together; settings.py, errors.py, telemetry.py are used everywhere
"""

__version__ = "0.1.0"
