--[[
The steps of a request's life. Each is executed by Redis as a whole, or not at all:

  EVALSHA <digest> <number of keys> <keys> <step> <arguments>

Commands are given as the number of their words and the words, one after the other.

accept  KEYS  none; or 1 the string of an idempotency key, 2 the journal of its request;
              or 1 the twins: equal requests that a retry may join, a line for each, `<until, ms> <id>
              <channel of its ingress>`, the oldest first
        ARGV  2 value of that string, 3 id of the last entry in that journal: nothing is done unless
              they are so; or 2 lifetime (ms), 3 this request's line;
              4... commands, of which the second gets the first one's reply as field `i`
        returns 1; 0 if the condition does not hold; the error of the command that was refused; the
              id of the twin that is joined: nothing else is done then
        LIMIT is the first command if the tenant has limits: what it has used of them (key), what
              has not ended (key), their lifetime (ms), now (ms), when the request has ended for
              certain (ms; 0: no limit counts it), its id, this month, the tokens and the background
              tokens that it takes, 1 if the minute counts it or 0, the limits in the order of `wanted`
              (0: none). Without a command behind it, nothing is accepted. It returns a list: the
              above, or -1 if nothing was accepted; the number of the limit that refuses or 0; and
              the numbers of `Standing` (policy/tenant_limits.py)
leave   KEYS  1 twins
        ARGV  2 id, 3 lifetime (ms): no retry joins this request
        returns 1
append  KEYS  1 journal
        ARGV  2 id, 3... fields of an entry that comes before the end or is it
        returns the id, or the error as without a script
record  KEYS  1 journal
        returns the size of the last entry, and the entries that tell how far the request is: the
              first of each epoch, the last that counts events, and the last, without their bytes
end     KEYS  1 journal, 2 ledger of the hour
        ARGV  2 number of entries, 3 row of the ledger, 4 column of the state, 5 times queued and
              running (ms), 6 attempts, 7 usage (empty: from outside, and the journal knows this and
              the attempts), 8 lifetime of the ledger (ms); 9... commands: the entries' first
        returns 1; nothing if the journal has gone; the error if an entry was refused: nothing is
              booked then
        TELL is a command of its own: it publishes to whoever has claimed a queue entry (stream,
              group, id, channel without the ingress's name, message);
        SETTLE, too: gives back what the request has taken of its tenant's limits (both keys,
              lifetime, id, month, tokens, background tokens, 1 if the minute counts it or 0), and
              counts what it has used;
        LEAVE, too: no retry joins a request any more, unless nobody alive has read it: then one may
              for a while (twins, id, channel, until and lifetime, ms)

A worker opens an attempt and appends its output by XADD, without a script. A Redis that has reached
its `maxmemory` refuses only the first write of a script, if that may need memory: `append` and `end`
begin by deleting what no stream has.
Source: https://redis.io/docs/latest/develop/programmability/eval-intro
]]
local TWINS = 32 -- equal requests at a time that a retry can join
local OVERDUE = 100 -- requests that nobody has ended, of which one call frees the places
local LARGE = {b = true, o = true, z = true, f = true} -- `f` means nothing without `b`

local function commands(at)
  return function()
    if at > #ARGV then return nil end
    local words = tonumber(ARGV[at])
    at = at + words + 1
    return {unpack(ARGV, at - words, at - 1)}
  end
end

local function refusal(reply) -- Redis 6.2 names the script in errors
  if type(reply) ~= 'table' or not reply.err then return nil end
  return redis.error_reply((string.gsub(reply.err, '^@user_script: %d+: %-?', '')))
end

local function field(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then return entry[2][i + 1] end
  end
end

local function last_with(name, entry) -- this entry, or the newest one before it that has the field
  while entry and not field(entry, name) do
    entry = redis.call('XREVRANGE', KEYS[1], '(' .. entry[1], '-', 'COUNT', 1)[1]
  end
  return entry
end

local function without_bytes(entry)
  local kept, size = {}, 0
  for i = 1, #entry[2], 2 do
    local name, value = entry[2][i], entry[2][i + 1]
    if name ~= 'u' then size = size + #value end
    if not LARGE[name] then
      kept[#kept + 1], kept[#kept + 2] = name, value
    end
  end
  return {entry[1], kept}, size
end

local function listens(channel) -- a dead ingress does not, and Redis knows at once
  return redis.call('PUBSUB', 'NUMSUB', channel)[2] > 0
end

local function read(id, channel) -- whether somebody alive reads it: who accepted it, or another
  if listens(channel) then return true end
  local namespace = string.match(channel, '^(.*:)w:')
  for _, ingress in ipairs(redis.call('ZRANGE', namespace .. 'a:' .. id, 0, -1)) do
    if listens(namespace .. 'w:' .. ingress) then return true end
  end
  return false
end

local function join(refused) -- the oldest twin whose ingress has died with its client, if any has
  local till, mine, namespace, ingress = string.match(ARGV[3], '^(%d+) %S+ ((.*:)w:(%S+))\n$')
  local now, kept, joined = till - ARGV[2], {}, nil
  local twins = redis.call('GET', KEYS[1]) or ''
  for twin, ends, id, channel in string.gmatch(twins, '((%d+) (%S+) (%S+:w:%S+)\n)') do
    local state = tonumber(ends) < now and 'over' or 'read'
    -- after a restart of Redis nobody listens for a moment, though all live
    if state == 'read' and not joined and listens(mine) and not read(id, channel) then
      local last = redis.call('XREVRANGE', namespace .. 'j:' .. id, '+', '-', 'COUNT', 1)[1]
      state = last and (field(last, 'k') or 'running')
      if state == 'running' then -- and is read here from now on
        redis.call('ZADD', namespace .. 'a:' .. id, ends, ingress)
        redis.call('PEXPIRE', namespace .. 'a:' .. id, ends - now)
      end
      if state == 'running' or state == 'completed' then joined = id end
    end
    if state == 'running' or state == 'read' then kept[#kept + 1] = twin end
  end
  if refused and not joined then return nil end
  if not joined and #kept < TWINS then kept[#kept + 1] = ARGV[3] end
  redis.call('SET', KEYS[1], table.concat(kept), 'PX', ARGV[2])
  return joined
end

local function leave(twins, id, till, lifetime) -- it is no twin any more or, with `till`, until then
  local found = redis.pcall('GETDEL', twins)
  if type(found) ~= 'string' then return end
  local left = till and till .. ' ' .. id .. ' %1' or ''
  left = string.gsub(found, '%d+ ' .. id .. ' (%S+\n)', left)
  if left ~= '' then redis.call('SET', twins, left, 'PX', lifetime) end
end

--[[
What a tenant has used of its limits, a string of numbers, to which a newer version may add some:

  w  minute since 1970     m  month     u  tokens of the month
  r, t  requests, and tokens, of the minute
  c, b  requests, and background tokens, of what has not ended: a sorted set has `<id> <background
        tokens>` of each, by when it has ended for certain. `c` is its size, written for an older
        version; `b` changes only with a member, and without one is 0 again
  d  tokens that answers have taken since beyond their reservations, which the next minute pays
]]
local STANDING = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (-?%d+)(.*)$'

local function used_of(key, running)
  local w, m, u, r, t, _, b, d, more = string.match(redis.call('GET', key) or '', STANDING)
  local known, of, c = w, tonumber, redis.call('ZCARD', running)
  if not known then w, m, u, r, t, b, d, more = 0, 0, 0, 0, 0, 0, 0, '' end
  if c == 0 then b = 0 end
  return {
    w = of(w), m = of(m), u = of(u), r = of(r), t = of(t), c = c, b = of(b), d = of(d), more = more
  }, known
end

local function save(key, lifetime, is)
  local form = string.rep('%.0f ', 7) .. '%.0f%s'
  local value = string.format(form, is.w, is.m, is.u, is.r, is.t, is.c, is.b, is.d, is.more)
  return redis.pcall('SET', key, value, 'PX', lifetime)
end

local function free(is, key, running, lifetime, now_ms) -- the places of what nobody could end
  if is.c == 0 then return end
  local overdue = redis.call('ZRANGEBYSCORE', running, '-inf', now_ms, 'LIMIT', 0, OVERDUE)
  if #overdue == 0 then return end
  is.c = is.c - #overdue
  for _, member in ipairs(overdue) do is.b = math.max(is.b - string.match(member, '%d+$'), 0) end
  -- a full Redis refuses this, and would let pass all that follows a deletion
  if save(key, lifetime, is).ok then redis.call('ZREM', running, unpack(overdue)) end
end

local function limited(limit) -- what is used now, and the number of the limit that refuses more
  local is, now, limits = used_of(limit[2], limit[3]), math.floor(limit[5] / 60000), {unpack(limit, 12)}
  local month, tokens, background = tonumber(limit[8]), tonumber(limit[9]), tonumber(limit[10])
  free(is, unpack(limit, 2, 5))
  -- clocks differ by less than a minute; if by more, Redis's own was set back
  if now > is.w or now < is.w - 1 then
    local minutes, each = math.max(now - is.w, 1), tonumber(limits[3])
    local owed = each > 0 and math.max(is.d - (minutes - 1) * each, 0) or 0
    is.w, is.r, is.t = now, 0, math.min(owed, each)
    is.d = owed - is.t
  end
  if month > is.m or month < is.m - 1 then is.m, is.u = month, 0 end
  local used, wanted = {is.u, is.r, is.t, is.c, is.b}, {tokens, 1, tokens, 1, background}
  for i, limit in ipairs(limits) do
    local most = tonumber(limit)
    if most > 0 and wanted[i] > 0 and used[i] + wanted[i] > most then return is, i end
  end
  return is, 0
end

local function take(limit, is)
  local _, key, running, lifetime, _, ends, id, _, tokens, background, by_minute = unpack(limit)
  is.r, is.t, is.u = is.r + by_minute, is.t + tokens * by_minute, is.u + tokens
  if ends ~= '0' and redis.call('ZADD', running, ends, id .. ' ' .. background) == 1 then
    is.c, is.b = is.c + 1, is.b + background
    redis.call('PEXPIRE', running, lifetime)
  end
  save(key, lifetime, is)
end

local function settle(used, key, running, lifetime, id, month, tokens, background, by_minute)
  local is, known = used_of(key, running)
  if is.c > 0 and redis.call('ZREM', running, id .. ' ' .. background) == 1 then
    is.c, is.b = is.c - 1, math.max(is.b - background, 0)
  end
  if not known then return end -- its lifetime is over
  local prompt, output = string.match(used, '^(%d+) %d+ (%d+)')
  local beyond = prompt + output - tokens
  is.d = is.d + beyond * by_minute
  if beyond > 0 or is.m == tonumber(month) then is.u = math.max(is.u + beyond, 0) end
  save(key, lifetime, is)
end

local steps = {}

function steps.accept()
  local following, is, over = commands(4), nil, 0
  local limit = ARGV[5] == 'LIMIT' and following()
  if limit then is, over = limited(limit) end
  local refused = over > 0 or limit and #ARGV == 4 + #limit
  local function told(done)
    if not limit then return done end
    return {done, done == -1 and over or 0, is.w, is.m, is.u, is.r, is.t, is.c, is.b}
  end

  if #KEYS == 1 then
    local first = not refused and redis.pcall('SET', KEYS[1], ARGV[3], 'NX', 'PX', ARGV[2])
    if first and first.err then return first end
    local id = not first and join(refused)
    if id then return told(id) end
  elseif #KEYS > 1 then
    local named = redis.call('GET', KEYS[1]) or ''
    local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
    if named ~= ARGV[2] or (last and last[1] or '') ~= ARGV[3] then return told(0) end
  end
  if refused then return told(-1) end
  local number, queued = 0, nil
  for command in following do
    number = number + 1
    if number == 2 then
      command[#command + 1], command[#command + 2] = 'i', queued
    end
    local reply = redis.pcall(unpack(command))
    if type(reply) == 'table' and reply.err then return reply end
    if number == 1 then queued = reply end
  end
  if limit then take(limit, is) end
  return told(1)
end

function steps.leave()
  leave(KEYS[1], ARGV[2], nil, ARGV[3])
  return 1
end

function steps.append()
  redis.pcall('XDEL', KEYS[1], '0-0')
  local reply = redis.pcall('XADD', KEYS[1], 'NOMKSTREAM', unpack(ARGV, 2))
  return refusal(reply) or reply
end

function steps.record()
  local newest = redis.pcall('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
  local last = newest[1]
  if not last then return {} end -- no journal, or a key of another type
  local found, from = {0}, '0-0'
  while redis.call('XLEN', KEYS[1]) > 1 do -- one entry with a large answer is not read twice
    local first = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', 1)[1]
    local epoch = first and tonumber(string.match(first[1], '^%d+'))
    if not first or first[1] == last[1] or epoch > 2^50 then break end
    found[#found + 1] = without_bytes(first)
    from = string.format('%.0f-0', epoch + 1)
  end
  local counted = last_with('e', last)
  if counted and counted[1] ~= last[1] then found[#found + 1] = without_bytes(counted) end
  found[#found + 1], found[1] = without_bytes(last)
  return found
end

steps['end'] = function()
  redis.pcall('XDEL', KEYS[1], '0-0')
  local attempts, used, outside = ARGV[6], ARGV[7], ARGV[7] == ''
  if outside then
    local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
    local counted = last_with('u', last)
    attempts = last and string.match(last[1], '^%d+') or '0'
    used = counted and field(counted, 'u') or '0 0 0 0 0'
  end

  local following = commands(9)
  for _ = 1, tonumber(ARGV[2]) do
    local append = following()
    if outside then
      append[#append + 1], append[#append + 2] = 'u', used
    end
    local reply = redis.pcall(unpack(append))
    if not reply or refusal(reply) then return refusal(reply) or false end
  end

  local more = {0, 0, 0, 0}
  more[tonumber(ARGV[4])] = 1
  for number in string.gmatch(used .. ' ' .. attempts .. ' ' .. ARGV[5], '%d+') do
    more[#more + 1] = tonumber(number)
  end
  local row, column, booked = {}, 0, redis.call('HGET', KEYS[2], ARGV[3])
  for number in string.gmatch(booked or '', '%d+') do
    column = column + 1
    more[column] = (more[column] or 0) + tonumber(number)
  end
  for i = 1, #more do row[i] = string.format('%.0f', more[i]) end
  redis.call('HSET', KEYS[2], ARGV[3], table.concat(row, ' '))
  if not booked then redis.call('PEXPIRE', KEYS[2], ARGV[8]) end

  for command in following do
    if command[1] == 'TELL' then
      local claims = redis.pcall('XPENDING', command[2], command[3], command[4], command[4], 1)
      if claims[1] then redis.call('PUBLISH', command[5] .. claims[1][2], command[6]) end
    elseif command[1] == 'LEAVE' then
      local _, twins, id, channel, till, lifetime = unpack(command)
      leave(twins, id, not read(id, channel) and till, lifetime)
    elseif command[1] == 'SETTLE' then
      settle(used, unpack(command, 2))
    else
      redis.call(unpack(command))
    end
  end
  return 1
end

return steps[ARGV[1]]()
