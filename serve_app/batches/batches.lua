--[[
The steps of a batch's life. Each is executed by Redis as a whole, or not at all:

  EVALSHA <digest> <number of keys> <keys> <step> <arguments>

create  KEYS  1 batch, 2 batches of its tenant, 3 tokens of the tenant's batches, 4 batches that are
              not over, 5 news
        ARGV  2 id, 3 facts, 4 now, 5 deadline, 6 lifetime (ms), 7 tokens, 8 most batches of the
              tenant that are not over, 9 most tokens of these (0: any number)
        returns what was found and the batch: `exists`, `created`; `many` or `tokens` and the number
              that is in use, if that many refuse it
cancel  KEYS  1 batch, 2 news
        ARGV  2 id, 3 now: ends a batch whose outcome is open
        returns the batch
lead    KEYS  1 leader
        ARGV  2 token, 3 lifetime (ms): takes or renews the lease
        returns 1; 0 if another one leads
resign  KEYS  1 leader
        ARGV  2 token: gives the lease up

All others are steps of the leader. Who does not hold the lease (any more) gets nothing, and changes
nothing, as for a batch that is not there (any more): KEYS 1 leader, 2 batch; ARGV 2 token.

checked KEYS  3 tokens of the tenant's batches
        ARGV  3 id, 4 lines, 5 tokens, 6 most tokens (0: any number), 7 now: its lines may be taken
        returns -1; the tokens of the tenant's other batches, if its own are too many beside them
take    KEYS  3 open lines
        ARGV  3 most lines: takes the next ones, for their first try
        returns the place of the first one, and how many
turn    KEYS  3 open lines
        ARGV  3 place, 4 its try until now, 5 its next one; 6... commands that release the request
              of the former try
        returns 1; 0 if that is not its try
mark    KEYS  3 open lines, 4 segments
        ARGV  3 name of the segment, 4 completed, 5 failed, 6 to 10 usage, 11 number of lines, 12...
              their places; then commands that release their requests
        returns 1; 0 if one of the lines is not open (any more): nothing is done then
close   KEYS  3 open lines
        ARGV  3 outcome, 4 output file, 5 error file, 6 now: nothing is taken or marked from now on
        returns outcome, output file and error file, as they were closed with first; 0 if it is not
              completed, because Redis has lost what was taken or marked
over    KEYS  3 open lines, 4 segments, 5 tokens of the tenant's batches, 6 batches that are not over,
              7 news
        ARGV  3 id, 4 outcome, 5 output file, 6 error file (empty: there is none), 7 lines without a
              result, 8 errors, 9 now, 10 lifetime (ms); 11... commands that tell of it: it is over
        returns 1

Commands are given as the number of their words and the words, one after the other. A step whose
answer was lost may be repeated.
Source: https://redis.io/docs/latest/develop/programmability/eval-intro
]]
local USAGE = {'prompt', 'cached', 'output', 'reasoning', 'recomputed'}
local LONGEST = 7 * 24 * 3600 * 1000 -- a `completion_window`, in ms
local OPEN = {validating = true, in_progress = true, finalizing = true, cancelling = true}

local function run(at)
  while at <= #ARGV do
    local words = tonumber(ARGV[at])
    redis.call(unpack(ARGV, at + 1, at + words))
    at = at + words + 1
  end
end

local function used(tokens, but) -- by the batches that are not over
  local sum, all = 0, redis.call('HGETALL', tokens)
  for i = 1, #all, 2 do
    if all[i] ~= but then sum = sum + tonumber(all[i + 1]) end
  end
  return sum, #all / 2
end

local function as_long_as_the_batch(key)
  redis.call('PEXPIRE', key, redis.call('PTTL', KEYS[2]))
end

local steps = {}

function steps.create()
  local found, number = 'exists', 0
  if redis.call('EXISTS', KEYS[1]) == 0 then
    local tokens, most = tonumber(ARGV[7]), tonumber(ARGV[9])
    local sum, many = used(KEYS[3])
    if many >= tonumber(ARGV[8]) then return {'many', many} end
    if most > 0 and sum + tokens > most then return {'tokens', sum} end
    redis.call('HSET', KEYS[1], 'facts', ARGV[3], 'state', 'validating')
    redis.call('ZADD', KEYS[2], ARGV[4], ARGV[2])
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[4] - ARGV[6] - LONGEST)
    redis.call('HSET', KEYS[3], ARGV[2], ARGV[7])
    redis.call('ZADD', KEYS[4], ARGV[5], ARGV[2])
    redis.call('ZADD', KEYS[5], ARGV[4], ARGV[2])
    for _, key in ipairs({KEYS[1], KEYS[2], KEYS[3]}) do -- an older batch may need more
      if redis.call('PTTL', key) < tonumber(ARGV[6]) then redis.call('PEXPIRE', key, ARGV[6]) end
    end
    found = 'created'
  end
  return {found, number, redis.call('HGETALL', KEYS[1])}
end

function steps.cancel()
  local state, outcome = unpack(redis.call('HMGET', KEYS[1], 'state', 'outcome'))
  if not outcome and (state == 'validating' or state == 'in_progress') then
    redis.call('HSET', KEYS[1], 'state', 'cancelling', 'cancelling_ms', ARGV[3])
    redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2])
  end
  return redis.call('HGETALL', KEYS[1])
end

function steps.lead()
  if redis.call('GET', KEYS[1]) == ARGV[2] then return redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
  return redis.call('SET', KEYS[1], ARGV[2], 'NX', 'PX', ARGV[3]) and 1 or 0
end

function steps.resign()
  if redis.call('GET', KEYS[1]) == ARGV[2] then redis.call('UNLINK', KEYS[1]) end
  return 1
end

local leaders = {}

function leaders.checked()
  local others, most = used(KEYS[3], ARGV[3]), tonumber(ARGV[6])
  if most > 0 and others + ARGV[5] > most then return others end
  if redis.call('HGET', KEYS[2], 'state') == 'validating' then
    redis.call('HSET', KEYS[2], 'state', 'in_progress', 'in_progress_ms', ARGV[7], 'total', ARGV[4])
    redis.call('HSET', KEYS[3], ARGV[3], ARGV[5])
  end
  return -1
end

function leaders.take()
  local is = redis.call('HMGET', KEYS[2], 'state', 'next', 'total')
  local first, total = tonumber(is[2] or 0), tonumber(is[3] or 0)
  local many = is[1] == 'in_progress' and math.min(tonumber(ARGV[3]), total - first) or 0
  if many > 0 then
    redis.call('HSET', KEYS[2], 'next', first + many)
    for place = first, first + many - 1 do redis.call('HSET', KEYS[3], place, 1) end
    as_long_as_the_batch(KEYS[3])
  end
  return {first, many}
end

function leaders.turn()
  local try = redis.call('HGET', KEYS[3], ARGV[3])
  if try == ARGV[5] then return 1 end
  if try ~= ARGV[4] then return 0 end
  redis.call('HSET', KEYS[3], ARGV[3], ARGV[5])
  run(6)
  return 1
end

function leaders.mark()
  if redis.call('ZSCORE', KEYS[4], ARGV[3]) then return 1 end
  local last = 11 + ARGV[11]
  local open = redis.call('HMGET', KEYS[3], unpack(ARGV, 12, last))
  for i = 1, #open do
    if not open[i] then return 0 end
  end
  if redis.call('HGET', KEYS[2], 'outcome') then return 0 end
  redis.call('ZADD', KEYS[4], redis.call('ZCARD', KEYS[4]), ARGV[3])
  as_long_as_the_batch(KEYS[4])
  redis.call('HDEL', KEYS[3], unpack(ARGV, 12, last))
  redis.call('HINCRBY', KEYS[2], 'completed', ARGV[4])
  redis.call('HINCRBY', KEYS[2], 'failed', ARGV[5])
  for i, name in ipairs(USAGE) do redis.call('HINCRBY', KEYS[2], name, ARGV[5 + i]) end
  run(last + 1)
  return 1
end

function leaders.close()
  if not redis.call('HGET', KEYS[2], 'outcome') then
    local is = redis.call('HMGET', KEYS[2], 'next', 'total')
    local left = (is[2] or 0) - (is[1] or 0) + redis.call('EXISTS', KEYS[3])
    if ARGV[3] == 'completed' and left > 0 then return 0 end
    redis.call('HSET', KEYS[2], 'outcome', ARGV[3], 'output_file', ARGV[4],
      'error_file', ARGV[5])
    if redis.call('HGET', KEYS[2], 'state') ~= 'cancelling' then
      redis.call('HSET', KEYS[2], 'state', 'finalizing', 'finalizing_ms', ARGV[6])
    end
  end
  return redis.call('HMGET', KEYS[2], 'outcome', 'output_file', 'error_file')
end

function leaders.over()
  if not OPEN[redis.call('HGET', KEYS[2], 'state')] then return 1 end
  redis.call('HSET', KEYS[2], 'state', ARGV[4], ARGV[4] .. '_ms', ARGV[9], 'output_file', ARGV[5],
    'error_file', ARGV[6], 'errors', ARGV[8])
  redis.call('HINCRBY', KEYS[2], 'failed', ARGV[7])
  redis.call('PEXPIRE', KEYS[2], ARGV[10])
  redis.call('UNLINK', KEYS[3], KEYS[4])
  redis.call('HDEL', KEYS[5], ARGV[3])
  redis.call('ZREM', KEYS[6], ARGV[3])
  redis.call('ZREM', KEYS[7], ARGV[3])
  run(11)
  return 1
end

if leaders[ARGV[1]] then
  if redis.call('GET', KEYS[1]) ~= ARGV[2] then return nil end
  if redis.call('EXISTS', KEYS[2]) == 0 then return nil end
  return leaders[ARGV[1]]()
end
return steps[ARGV[1]]()
