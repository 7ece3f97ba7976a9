--[[
The outbox. Each step is executed by Redis as a whole, or not at all:

  EVALSHA <digest> 6 <keys> <step> <now, Unix ms> <arguments>

  KEYS  1 stream: events that have just happened, of which nobody has taken notice
        2 sorted set: routes, by when a delivery of theirs is due and nobody holds them
        3 sorted set: deliveries that wait, by when their event happened (ms)
        4 hash: how many of them each tenant has; under '' how many events were added since the last look,
    and were left by it
        5 hash: until when each route is held or pauses (ms)
        6 stream: dead deliveries

A delivery is `<receiver>|<tenant>\n<JSON>` (webhooks/events.py), of which the first line names its
route: a sorted set of its own, by when each is due (ms). One ingress at a time holds a route. If it
dies, the route is due again after the lease, with all that it has not settled.

file    ARGV  3 most that wait, 4 most of one tenant, 5 most that are dead, 6 most events
        moves events into their routes. Beyond a bound, the delivery of the route that has failed for
        longest is dead, or the oldest of all
        returns how many were moved, how many are dead for that, how many wait, since when (ms; 0),
              and how many events the stream has lost, because it holds no more than wait
take    ARGV  3 lease (ms), 4 most routes, 5 most deliveries of each
        returns of each route that is held from now on: its name, and pairs of a delivery and when its
        event happened (ms)
settle  ARGV  3 lease (ms), 4 route, 5 pause (ms), 6 most that are dead, 7 most deliveries, 8...
              triples: delivery; when it is due again (ms; empty: never); why it is dead (or empty)
        returns the next pairs, and the route stays held; nothing, if it was let go
again   ARGV  3 most that are dead, 4 id of a dead delivery
        returns 1 if it waits again; nothing if there is no such one
]]
local STREAM, ROUTES, SINCE, COUNTS, HELD, DEAD = unpack(KEYS)
local now = tonumber(ARGV[2])

local function route_of(delivery) return string.match(delivery, '^([^\n]*)\n') end

local function tenant_of(route) return string.match(route, '|(.*)$') end

local function key_of(route) return ROUTES .. ':' .. route end

local function rest(route, till) -- nobody holds it; it is looked at when one is due, not before `till`
  local first = redis.call('ZRANGE', key_of(route), 0, 0, 'WITHSCORES')
  redis.call('HDEL', HELD, route)
  if not first[1] then
    redis.call('ZREM', ROUTES, route)
  else
    redis.call('ZADD', ROUTES, math.max(tonumber(first[2]), till), route)
    if till > now then redis.call('HSET', HELD, route, till) end
  end
end

local function add(delivery, since)
  local route = route_of(delivery)
  if redis.call('ZADD', SINCE, 'NX', since, delivery) == 0 then return end
  redis.call('ZADD', key_of(route), now, delivery)
  redis.call('HINCRBY', COUNTS, tenant_of(route), 1)
  local till = tonumber(redis.call('HGET', HELD, route) or now)
  redis.call('ZADD', ROUTES, 'LT', math.max(now, till), route)
end

local function remove(delivery)
  if redis.call('ZREM', SINCE, delivery) == 0 then return false end
  local route = route_of(delivery)
  redis.call('ZREM', key_of(route), delivery)
  if redis.call('HINCRBY', COUNTS, tenant_of(route), -1) <= 0 then
    redis.call('HDEL', COUNTS, tenant_of(route))
  end
  return true
end

local function die(delivery, why, most)
  if remove(delivery) and tonumber(most) > 0 then
    redis.call('XADD', DEAD, 'MAXLEN', most, '*', 'd', delivery, 'w', why)
  end
end

local function due(route, most)
  local found = {}
  for _, delivery in ipairs(redis.call('ZRANGEBYSCORE', key_of(route), '-inf', now, 'LIMIT', 0, most)) do
    found[#found + 1] = delivery
    found[#found + 1] = redis.call('ZSCORE', SINCE, delivery) or ARGV[2]
  end
  return found
end

local function hold(route, lease)
  redis.call('ZADD', ROUTES, now + lease, route)
  redis.call('HSET', HELD, route, now + lease)
end

local steps = {}

redis.call('XDEL', STREAM, '0-0') -- a full Redis refuses only a first write that needs memory

function steps.file()
  local most, each, kept = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
  local events, dead = redis.call('XRANGE', STREAM, '-', '+', 'COUNT', ARGV[6]), 0
  local lost = tonumber(redis.call('HGET', COUNTS, '') or 0) - redis.call('XLEN', STREAM)
  for _, event in ipairs(events) do
    local delivery = event[2][2]
    redis.call('XDEL', STREAM, event[1])
    add(delivery, string.match(event[1], '^%d+'))
    local route, too_many = route_of(delivery), nil
    if tonumber(redis.call('HGET', COUNTS, tenant_of(route)) or 0) > each then
      too_many = redis.call('ZRANGE', key_of(route), -1, -1)[1]
    elseif redis.call('ZCARD', SINCE) > most then
      too_many = redis.call('ZRANGE', SINCE, 0, 0)[1]
    end
    if too_many then
      die(too_many, 'too_many', kept)
      dead = dead + 1
    end
  end
  if #events > 0 then redis.call('HSET', COUNTS, '', redis.call('XLEN', STREAM)) end
  local oldest = redis.call('ZRANGE', SINCE, 0, 0, 'WITHSCORES')
  return {#events, dead, redis.call('ZCARD', SINCE), tonumber(oldest[2] or 0), math.max(lost, 0)}
end

function steps.take()
  local found = {}
  for _, route in ipairs(redis.call('ZRANGEBYSCORE', ROUTES, '-inf', now, 'LIMIT', 0, ARGV[4])) do
    local its = due(route, ARGV[5])
    if #its == 0 then
      rest(route, now)
    else
      hold(route, tonumber(ARGV[3]))
      found[#found + 1] = {route, unpack(its)}
    end
  end
  return found
end

function steps.settle()
  local lease, route, pause = tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
  for i = 8, #ARGV, 3 do
    local delivery, again, why = unpack(ARGV, i, i + 2)
    if again ~= '' then
      redis.call('ZADD', key_of(route), 'XX', again, delivery)
    elseif why ~= '' then
      die(delivery, why, ARGV[6])
    else
      remove(delivery)
    end
  end
  local its = pause == 0 and due(route, ARGV[7]) or {}
  if #its == 0 then rest(route, now + pause) else hold(route, lease) end
  return its
end

function steps.again()
  local found = redis.call('XRANGE', DEAD, ARGV[4], ARGV[4])[1]
  if not found then return nil end
  redis.call('XDEL', DEAD, ARGV[4])
  add(found[2][2], now)
  return 1
end

return steps[ARGV[1]]()
