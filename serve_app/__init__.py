"""hermes-serve. The path of a request, file by file:

ingress/app.py                receives HTTP; api_keys.py: for which tenant
ingress/validation/           refuses what is invalid: structure.py (size and shape of the JSON),
                              fields.py (each field, by the table fields.toml), bodies.py (what goes
                              together, and limits)
ingress/inference.py          decides class, session and deadline: a Submission
admission/limits.py           how many requests may wait, how large they are, how full Redis is;
                              policy/overload.py: how long one would wait
admission/admission.py        checks the limits; writes journal, body and queue entry together, and
                              only then is the request accepted
request_queue.py              the queue of each class, as Redis Streams
dispatch/dispatcher.py        claims while engines have capacity; unserved.py ends those whose model
                              nobody serves any more
policy/order.py               which is next; classes.py: of which class; tenant_lines.py: of which
                              tenant; prediction.py: how long its answer will be
dispatch/attempts.py          carries a request to its end: calls a worker until it has answered, is
                              lost or given up: what follows a lost attempt, when it is poison
policy/placement.py           chooses the replica; cluster/direct_calls.py calls it, or, through
                              cluster/serve_router.py, Ray Serve
workers/replica.py            execute(request_id, epoch): opens an attempt and runs the engine; how
                              many sequences the engine takes
workers/replay.py             reads what older attempts produced; continuation.py continues it
workers/vllm_engine.py        runs vLLM's engine and its own server app; engine.py: any engine;
                              loop_watch.py ends a request that blocks the event loop
workers/request_body.py       the request as vLLM's server takes it; schemas.py: which JSON schemas
                              an engine obeys; grammars.py: what else gives an answer its shape;
                              vllm_failures.py: what vLLM refuses, in the ingress's words
workers/resumable.py          takes the place of vLLM's engine client: records outputs, replays them
workers/chunks.py             writes the chunks of a stream; determinism.py: with the same ids and
                              times in every attempt
workers/attempt.py            engine outputs and response bytes become journal entries, up to the
                              attempt's stop
journal/attempt_log.py        what an attempt has produced, and what Redis has accepted of it
journal/entries.py            how entries and wake-ups are stored; events.py: the events in them
workers/journal_writer.py     fenced appends, group commit, wake-ups
ingress/followers.py          passes accepted entries to the connections; journal/reader.py
                              interprets them
ingress/exchange.py           forwards the bytes to the client; protocol_events.py: with signs of
                              life, or an error; disconnects.py: what happens when it leaves
ingress/client_connections.py the server's side of HTTP, and who does not read

How it ends:

requests/lifecycle.lua        the steps of a request's life, each as a whole: accept, record, end,
                              with tenants' limits and the ledger; lifecycle.py sends them
requests/endings.py           ends requests without a worker: cancelled or given up; deadlines.py:
                              those that are overdue
workers/attempt.py            ends those that a worker runs
reasons.toml                  what follows from each reason: status, message, whether to retry
requests/record.py            what is known of a request; store.py reads journals;
                              dead_letters.py keeps what was given up

Beside its path:

ingress/objects_api.py        what is stored, for clients: requests, responses, chats; objects.py:
                              as JSON; conversations.py: responses that go on from earlier ones
ingress/operator_api.py       what operators see and do; connection_limits.py: what an ingress holds
policy/tenants.py             who sends requests, and what each may; tenant_limits.py: how much
policy/work.py                how much a request asks for; scaling.py: how many engines that needs
workers/schemas.py            what vLLM and xgrammar would not obey, refuse or tell as OpenAI does:
                              with vllm_failures.py, answers.py, responses.py, messages.py
batches/                      runner.py: which batches, under a lease; job.py: one from its check to
                              its files; line_requests.py: a line as a request; record.py: in Redis
webhooks/                     outbox.py: events that wait; sender.py: delivers them, with post.py;
                              events.py: which there are, for whom, and when they are tried again
files/                        uploaded files: storage.py (a folder or S3), files.py (their records)
cluster/leases.py             which processes are alive; entrance.py: whose the namespace is;
                              key_notices.py: which API keys are revoked; members.py: who is
                              certainly dead; replicas.py: which can take work
redis/                        connections and the client; keyspace.py: every key; check.py: whether
                              it can be used, and keeps what it accepted
observability/                metrics, traces, log lines
cli/                          the command hermes-serve; local/: a service on this machine, for
                              scripts/quickstart and `hermes-serve up`
processes.py, deploy.py       compose one process, and the application
settings/, errors.py, contract.py, clock.py are used everywhere; timings.py: times that are
                              not settings, each with its reason
"""

__version__ = "0.3.0rc1"
