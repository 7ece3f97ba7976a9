--[[
What is known of files. Each step is executed by Redis as a whole, or not at all:

  EVALSHA <digest> <number of keys> <keys> <step> <arguments>

add     KEYS  1 record, 2 the tenant's files, 3 bytes of all tenants, 4 files that expire,
              5 (optional) an idempotency key
        ARGV  2 id, 3 tenant, 4 the record, 5 its bytes, 6 now (ms), 7 when it expires (s; 0: never),
              8 most bytes and 9 most files of a tenant (0: no bound), 10 value of the idempotency
              key, 11 its lifetime (ms)
        returns "there" and the record that is there: this one, an equal one of the same idempotency
              key, or the one that has this id already; "differs", if that key's value is another;
              or "full", the bytes and the number of the tenant's files
remove  KEYS  1 record, 2 the tenant's files, 3 bytes of all tenants, 4 files that expire
        ARGV  2 id, 3 tenant, 4 its bytes
        returns 1; 0 if it has gone already
]]
if ARGV[1] == 'add' then
  local there = redis.call('GET', KEYS[1])
  if not there and KEYS[5] then
    local known = redis.call('HGET', KEYS[5], 'record')
    there = known and redis.call('GET', known)
    if there and redis.call('HGET', KEYS[5], 'value') ~= ARGV[10] then return {'differs'} end
  end
  if there then return {'there', there} end
  local used = tonumber(redis.call('HGET', KEYS[3], ARGV[3]) or 0)
  local count = redis.call('ZCARD', KEYS[2])
  local most_bytes, most_files = tonumber(ARGV[8]), tonumber(ARGV[9])
  if (most_bytes > 0 and used + tonumber(ARGV[5]) > most_bytes)
    or (most_files > 0 and count >= most_files) then
    return {'full', used, count}
  end
  redis.call('SET', KEYS[1], ARGV[4])
  local newest = tonumber(redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2] or 0)
  redis.call('ZADD', KEYS[2], math.max(tonumber(ARGV[6]), newest + 1), ARGV[2]) -- in this order
  redis.call('HINCRBY', KEYS[3], ARGV[3], ARGV[5])
  if ARGV[7] ~= '0' then redis.call('ZADD', KEYS[4], ARGV[7], ARGV[2]) end
  if KEYS[5] then
    redis.call('HSET', KEYS[5], 'record', KEYS[1], 'value', ARGV[10])
    redis.call('PEXPIRE', KEYS[5], ARGV[11])
  end
  return {'there', ARGV[4]}
end

if redis.call('UNLINK', KEYS[1]) == 0 then return 0 end
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('ZREM', KEYS[4], ARGV[2])
if redis.call('HINCRBY', KEYS[3], ARGV[3], -ARGV[4]) <= 0 and redis.call('ZCARD', KEYS[2]) == 0 then
  redis.call('HDEL', KEYS[3], ARGV[3])
end
return 1
