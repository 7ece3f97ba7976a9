"""Times and bounds that are not settings, each with its reason, by the package that uses them.

A value that an operator may want to change is a setting (docs/settings.md). The values here depend
on each other: most are a fraction or a multiple of another. Tests that want to wait less change
them here, so use them as `timings.NAME`.
"""

from __future__ import annotations

# -- loops ----------------------------------------------------------------------------------------

LOOP_FAILURES = 5
"""A process is unhealthy if one loop ends this often within `LOOP_FAILURES_WITHIN_S`."""
LOOP_FAILURES_WITHIN_S = 60.0
"""Older failures say nothing about a loop that runs today."""
LOOP_RESTART_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before an ended loop restarts, by the number of recent failures."""
LOOP_CANCEL_AGAIN_S = 0.5
"""A task that goes on after its cancellation is cancelled again: a library swallowed it."""

# -- redis ----------------------------------------------------------------------------------------

REDIS_QUIET_S = 0.2
"""Callers fail at once for this long after a failure, so that not all of them connect."""
SENTINEL_ANSWER_S = 0.5
"""How long one Sentinel may take before the next is asked; all must fit into an admission."""
CLOCK_GOOD_FOR_S = 10.0
"""The quickest answer of this period sets the clock, which hardly drifts meanwhile."""

REDIS_CHECK_RETRY_S = 1.0
"""Time between two tries of a Redis that cannot be used."""
REDIS_CHECK_AGAIN_S = 60.0
"""Time between two tries of a Redis that can, unless a lease or a request was refused before."""
REDIS_SIZES_AGAIN_S = 60.0
"""Time between two tries of the largest value, which sends `ingress.max_body_bytes`."""
REDIS_SIZE_ANSWER_S = 10.0
"""How long such a value may take to get there and back."""
REDIS_ANSWER_COUNTS_S = 5.0
"""How long Redis's own words count for more than the network's, which follow them."""
REDIS_TELL_AGAIN_S = 60.0
"""A problem of Redis that comes and goes is logged no more often than this."""
REDIS_CHECK_NAME_S = 15.0
"""How long a name may take: a resolver asks each server twice for five seconds."""
REDIS_CHECK_ANSWER_S = 5.0
"""How long a connection or an answer may take in this check, where nobody waits for a token."""
DOCTOR_S = 4.5
"""How long `hermes-serve doctor` looks, of the five seconds that a person waits for it."""
REDIS_TRIAL_MS = 60_000
"""How long Redis keeps what a try has written if its process dies in between."""

# -- journal --------------------------------------------------------------------------------------

APPEND_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses before the writer appends again, by the failures; a failover takes about a second."""
WRITER_SILENCE_S = 1.0
"""An attempt that has appended nothing for this long looks whether its journal has ended."""
FOLLOWER_SILENCE_S = 1.0
"""A follower that has received nothing for this long reads: the cost of a lost wake-up."""
FOREIGN_BLOCK_S = 1.0
"""How long a read waits in Redis for news of the requests whose wake-ups go to another ingress."""
FOLLOWER_LOOKS_A_S = 2_000
"""Journals that an ingress reads so in a second, however many are silent: when another one dies,
all of its streams come at once. So many streams are each looked at once a second.
"""
FOLLOWERS_A_LOOK = 500
"""Journals per round trip of such a read; more would delay other readers of the connection."""
ENTRIES_A_LOOK = 64
"""Entries of one journal per such read; a follower with more to read reads pages."""
PAGE_ENTRIES = 256
"""Most entries per page of a journal; the next page is read when these have been consumed."""
FIRST_PAGE_ENTRIES = 32
"""Entries of the first page, when nobody knows yet how large they are."""
PAGE_BYTES = 256 * 1024
"""After a larger page the next one has fewer entries, because who does not read keeps a page."""
ENTRY_BYTES = (1 << 20) - 1_024
"""An entry holds about this much of a response and of the engine's outputs, so that no append keeps
those of other requests waiting: sending a MiB takes about a millisecond. It is a little less than
the least that Redis's `proto-max-bulk-len` and `client-query-buffer-limit` can be.
"""
ENTRY_OUTPUTS = 1_024
"""Engine outputs per entry: encoding many more than fit would cost time."""
OPENING_WAKE_S = 0.05
"""The wake-up of an opening goes with the next one of its worker, or alone after this time."""
ENTRIES_PER_S = 500
"""A worker that makes twice as many outputs may write several of a stream together."""
PACK_BYTES = 128 * 1024
"""A writer packs accepted entries of one attempt above this, in 0.2 ms; short answers never."""
PACK_AT_MOST_BYTES = 2 * PACK_BYTES
"""More, because the last entry is large, is kept as it is: embeddings would take 2 ms."""
PACK_AT_ONCE_BYTES = 128 * 1024
"""A transcript up to this size, some 400 tokens, is packed on the event loop: 0.2 ms, 1 ms for
embeddings. A larger one is packed in a thread, which costs the loop 0.1 ms. Of higher levels of
compression, whose times grow with them, the size is divided by the level.
"""
LARGE_BYTES = 64 * 1024
"""What is larger goes over a connection to Redis that nobody else waits for. An entry with more
response bytes is announced without them, and readers read the stream: Redis drops a subscriber for
which more than 32 MB wait (cluster/redis.conf).
"""
SUBSCRIPTION_RETRY_S = 0.1
"""Pause before subscribing again; until then streams rely on `FOLLOWER_SILENCE_S`."""
SUBSCRIPTION_PING_S = 1.5
"""A subscription that was silent for this long is pinged: a dead one looks the same."""
SUBSCRIPTION_ANSWER_S = 2.5
"""How long the answer to that ping may take; so a dead connection is replaced after 4 s."""
ENDED_WITHIN_S = 300.0
"""A journal outlives its deadline by at least this long, so that a late ending finds it. Then what
nobody could end no longer counts for its tenant's limits.
"""

WHOLES_AT_ONCE = 4
"""Whole journals of up to `journal.max_answer_bytes` that one ingress holds at a time."""

KEPT_LOOK_S = 2.0
"""How old an ingress's knowledge of a tenant's kept answers may be."""

HOUR_S = 3_600
"""OpenAI's buckets of usage begin at full hours of Unix time."""

HOUR_MS = 3_600_000
"""The ledger sums up by the hour in which requests end, or in which kept answers expire."""

# -- request queue --------------------------------------------------------------------------------

CLAIM_BLOCK_MS = 1_000
"""How long a claim waits for the first entry. It is shorter than the time that a connection may be
silent; otherwise an idle queue would look like a dead Redis.
"""
TAKE_OVER_IDLE_MS = 1_000
"""A claim that was touched this recently is not taken over: another ingress was faster."""
CLAIM_ANSWER_LOST_MS = 8_000
"""An ingress takes up its own claim after this time; earlier, the answer may still arrive."""
TAKE_OVER_AT_MOST = 1_000
"""Claims checked per round trip."""
OVERDUE_A_LOOK = 500
"""Requests that one sweep for passed deadlines ends."""
DEAD_LETTERS_A_PAGE = 10
"""Dead letters per reply; a body may have many megabytes."""

# -- cluster --------------------------------------------------------------------------------------

LEASE_RENEW_S = 0.5
"""Time between two renewals; five renewals may fail before a lease expires."""
LEASE_MS = 3_000
"""Length of the lease of an ingress or a worker: how soon its death is noticed if no call fails."""
LEASE_PATIENCE_S = 10.0
"""After so long without a quick read, who was in none of the reads is dead (docs/adr/0013)."""
LEASE_QUICK_S = 0.5
"""A read that takes no longer shows every living process, because all have renewed meanwhile."""
LEASE_STEADY_S = LEASE_MS / 1000 - LEASE_RENEW_S
"""A renewal that takes as long as such a read still leaves a lease."""
SERVICE_KNOWN_MS = 60_000
"""How long a namespace stays a service's without ingress: longer than a restart of all."""
CLUSTER_KNOWN_MS = 86_400_000
"""A Ray cluster that has had no ingress for so long counts as a new one."""
MODEL_GONE_MS = 30_000
"""What waits for a model that was not served for so long is refused; Serve starts one sooner."""
UNSERVED_LOOK_S = 1.0
"""Time between two looks for such models, which cost nothing while there is none."""
UNSERVED_A_LOOK = 200
"""Requests of each class of such a model that one look ends."""
REPLICA_AVOID_S = 5.0
"""A replica at which a call has failed gets no requests until its lease would have expired."""

# -- dispatch -------------------------------------------------------------------------------------

CLAIM_RETRY_S = 0.2
"""Pause before the dispatcher claims again after Redis has failed."""
TAKE_OVER_S = 0.5
"""Time between two searches for claims of dead ingresses; short compared with their lease."""
WAITING_TELL_S = 15.0
"""A request that waits longer for the same thing is logged, and again after the same time."""
WAITING_TELL_AT_MOST = 20
"""Requests logged at a time; the log gives only the number of the others."""
ATTEMPT_RETRY_S = 0.2
"""Pause before a step of an attempt is repeated; also how long a call may take to report."""
ATTEMPT_REFUSED_S = (0.2, 0.4, 0.8, 1.6, 2.0)
"""Pauses before an attempt that no worker has opened is repeated, by how often that was."""
ATTEMPT_UNREAD_S = (0.2, 1.0, 5.0, 30.0)
"""The same for attempts that were opened and not read; each leaves two entries in its journal."""
DEFECT_RETRY_S = (1.0, 5.0)
"""Pauses after our own code has failed on a request; then it ends as `internal`."""
ATTEMPT_OPENS_S = 3.0
"""An adopted request whose attempt is not opened within this time gets a new attempt."""
CALL_OPENS_S = 5.0
"""A call that has not opened its attempt within this time is given up for another replica."""
CALL_LOOK_S = 60.0
"""A call without an answer looks so often whether its request has ended: the cost of a lost one."""
CALL_PROOF_S = 5.0
"""How long both ends of a direct connection may take to prove that they know its key."""
CALL_UNREAD_MS = 20_000
"""A direct connection is lost if the other machine does not confirm what was sent for so long."""
CALL_CONNECTIONS = 256
"""The most connections that a worker accepts for direct calls."""
CALL_FRAME_BYTES = 4096
"""The most bytes of a call or of its answer."""
CALL_WAKE_BYTES = 1 << 20
"""A message of wake-ups of this size or more is published."""
CALL_MESSAGE_CHARS = 300
"""How much of an error's text the answer to a call has."""
DEADLINE_GRACE_S = 0.5
"""An ingress ends a request so long after its deadline; the worker that runs it comes first."""
DEADLINE_SWEEP_S = 0.5
"""Time between two searches for requests whose deadline has passed."""
QUARANTINE_LEASE_S = 10.0
"""How long other suspects wait if the holder of their lock dies."""
QUARANTINE_LOOK_S = 0.2
"""Time between two attempts to get that lock."""
ADOPTED_LOOK_S = 0.5
"""Time between two checks of an adopted request, if there are at most `ADOPTED_MANY`."""
ADOPTED_MANY = 500
"""With more adopted requests each is checked less often, so that checks never occupy the loop."""
ADOPTED_SILENT_S = 60.0
"""An adopted attempt that has written nothing for this long has a next one: longer than a prompt is
read, or an answer waits that is written as a whole.
"""

# -- admission ------------------------------------------------------------------------------------

RETRY_AFTER_S = 1.0
"""Lowest `Retry-After` of a request that a limit refuses; every end frees capacity."""
FULL_STORAGE_RETRY_AFTER_S = 5.0
"""The same for a full Redis: memory is freed when journals expire, which takes longer."""
KEYED_TRIES = 5
"""How often an admission with an `Idempotency-Key` tries again after another repeat was faster."""
LIMITS_KEPT_MS = 32 * 24 * HOUR_MS
"""How long it is known what a tenant has used of its limits, the longest of which is a month's."""
KEY_OUTLIVES_MS = 60_000
"""How much longer the pointer of an idempotency key lives than the journal of its request."""

# -- batches --------------------------------------------------------------------------------------

BATCH_LEASE_MS = 5_000
"""How soon another ingress works on the batches if the one that did so has died."""
BATCH_RENEW_S = 1.0
"""Time between two renewals of that lease, and between two tries of the others to get it."""
BATCH_LOOK_S = 5.0
"""Time between two looks at all batches that are not over. News of one come at once; they are lost
only if the answer of Redis is.
"""
BATCH_TICK_S = 1.0
"""How late a batch notices that its window opens or closes, or that its deadline has passed."""
BATCH_STOP_AGAIN_S = 0.5
"""Time between two tries to end the lines of a batch that was cancelled, or whose window closed."""
BATCH_SEGMENT_S = 10.0
"""How long a result waits for others before it is written: what a death may cost is bounded."""
BATCH_RETRY_S = (0.5, 1.0, 2.0, 5.0, 15.0)
"""Pauses before a step of a batch is repeated, after the storage or Redis has failed."""
BATCH_REFUSED_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before a line is submitted again that was refused because of load."""
BATCH_LINE_KEPT_S = 86_400.0
"""How much longer than until the deadline a line's answer is kept if nobody collects it, and what
the storage lacks is waited for, such as a volume that is not mounted.
"""
BATCH_SHOW_S = 2.0
"""Time between two looks at how far the batches are, for the metrics."""
BATCH_RUBBISH_S = 3_600.0
"""Time between two searches for segments that no batch needs."""

# -- ingress --------------------------------------------------------------------------------------

DEADLINE_ANSWERED_S = 2.5
"""So long after its deadline a client is answered although Redis has not told that it is over."""
SEND_BYTES = 16 * 1024
"""A piece of an answer. The server's `send` waits while the socket's buffer holds more than 64 KiB
(the bound of asyncio and uvloop), so a client that does not read keeps at most that and a piece.
"""
STALLED_LOOK_AT_MOST_S = 5.0
"""Longest time between two searches for clients that do not read."""
KEYS_FILE_LOOK_S = 1.0
"""Time between two checks whether the file of API keys has changed."""
REVOKED_MS = 30 * 86_400_000
"""How long a revoked API key is refused that a file still has."""
REVOKED_LATE_MS = 60_000
"""How much later than a newer one a revoked key may be added to those in Redis."""
READER_RENEW_S = 2.0
"""Time between two looks for readers that are to be written down."""
READER_KNOWN_MS = 120_000
"""How long it holds that an ingress reads a request; it is written again after half of it."""
READER_SLOW_S = 1.0
"""If Redis reports more slowly that nobody reads a request, new readers may not count yet."""
CANCEL_RETRY_S = 0.5
"""Pause before searching again for a request that nobody reads and that Redis does not know yet."""
ADMISSION_MAY_COME_S = 10.0
"""An admission whose answer was lost may still reach Redis this long after Redis's first answer."""
DEPTHS_LOOK_S = 0.5
"""Time between two reads of the queues' depths and Redis's memory, by which admission decides."""

# -- observability --------------------------------------------------------------------------------

SNAPSHOT_KEPT_S = 5
"""Shortest time for which a process's metrics page is kept; normally four periods."""
ACTIVITY_LOOK_S = 0.5
"""Time between two samples of the event loop's lag and the threads' CPU time; one takes some 50 µs.
"""
TRACES_EXPORT_MS = 1_000
"""Time between two exports of traces; a process that dies loses at most this much."""

# -- files ----------------------------------------------------------------------------------------

FILE_UPLOAD_S = 3600.0
"""The longest that an upload may take, if something comes all the time."""
FILE_EXPIRES_LEAST_S, FILE_EXPIRES_MOST_S = 3_600, 2_592_000
"""How long after its creation a file may expire that says so, as OpenAI has it."""
FILE_KEY_MS = 86_400_000
"""How long the `Idempotency-Key` of an upload is remembered."""
FILES_SWEEP_MS = 600_000
"""Time between two searches for files that have expired: nobody can read them meanwhile."""
FILES_SWEEP_LOOK_S = 60.0
"""Time between two looks of an ingress whether a search is due."""
UNKNOWN_OBJECT_S = 86_400.0
"""How old an object without a record is when it is deleted: more than an upload or the making of an
output takes. For as long segments outlive their batch: more than what Redis may lose of its end.
"""

# -- workers --------------------------------------------------------------------------------------

HEALTH_LOOK_S = 0.5
"""Time between two checks of a worker whether its engine makes progress."""
VOID_FOR_S = 10.0
"""How long after Redis's last failure a worker looks for an opening whose answer was lost."""
APP_ABORT_S = 5.0
"""How long vLLM's app may clean up after its client has left, before its task is cancelled."""
LOOP_LOOK_S = 0.2
"""Time between two checks of a worker whether a request blocks its event loop."""
MASK_S = 0.02
"""CPU time that a grammar's masks may take on average; more counts against its budget."""
MASKS_S = 1.0
"""Budget of a grammar: CPU time beyond that, in all requests of a tenant."""
SIMULATED_HOLD_S = 1.5
"""How long the simulated engine's fault `hold` computes; above `max_event_loop_block_s`."""

# -- webhooks -------------------------------------------------------------------------------------

WEBHOOK_LOOK_S = 1.0
"""Time between two looks for what is due again; new events wake the sender."""
WEBHOOK_LEASE_S = 30.0
"""How long an ingress holds a route without a sign of life; longer than a try takes."""
WEBHOOK_ANSWER_S = 10.0
"""How long a receiver may take in all: name, connection and answer."""
WEBHOOK_ROUTES = 64
"""Routes that an ingress works on at a time."""
WEBHOOK_ROUTES_ALIKE = 8
"""How many of them are of one tenant, or of one host."""
WEBHOOKS_OF_A_ROUTE = 4
"""Deliveries of a route at a time; so one ingress has at most 256 connections, 32 to a host."""
WEBHOOK_PAUSE_S = 60.0
"""Longest pause of a route of which all have failed that were tried; then new ones have a try."""
WEBHOOK_CROWDED_S = 1.0
"""When a route is looked at again for which there was no room."""
WEBHOOK_EVENTS_A_LOOK = 100
"""New events that one script sorts, in 1.3 ms."""
WEBHOOK_RESOLVERS = 8
"""Threads that look up names for webhooks, and for nothing else."""

PROGRESS_LOOK_S = 1.0
"""Between two looks of a command that waits for the end of a batch."""
