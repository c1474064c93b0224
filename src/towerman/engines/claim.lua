#!lua name=towerman_0
--[[
The ledger of many processes, in one place: what is held, spent and waited for of one admission group.

The name is replaced when the library is loaded: it ends in a digest of this text, so that two versions stand side by
side. What they share is the layout of the data, which has a number of its own.

House rules. Every number is whole: instants and lengths in microseconds, amounts in millionths; whatever could pass
2^53 is kept in two parts. Time is the server's. Counts and records are read once, changed in memory and written at the
very end, so that a call that fails has changed none of them; only places in lots are written at once, and a place
without its record is put right by whoever meets it. No loop is longer than the bounds below and what is asked, but for a
rate that becomes a bucket or stops being one.

The head comment of the room (engines/__init__.py) says what the keys and records are and what is promised.
]]

local LAYOUT = 1
local STATE, RING, LEASE, ENDS, WAIT, REST = 1, 2, 3, 4, 5, 6 -- places of the keys

local PASSES = 16 -- times that a waiter may be passed before it is promoted
local AHEAD = 8 -- waiters of one lot that are tried although those before them stay
local TRIES = 64 -- waiters that are tried in one call
local REAPED = 128 -- leases that are reaped in one call
local SWEPT = 4 -- states out of use that are looked at in one call
local FORGOTTEN = 16 -- starts out of use that are forgotten at a time
local CLAIMANTS = 16 -- promoted waiters at a time
local PAGE = 500 -- records or states that are told in one call

local NEVER = 4503599627370496 -- 2^52
local LAST = 2 * NEVER -- numbers are exact up to there; what would be later is as late as that
local MICRO = 1000000 -- microseconds in a second
local LATE = MICRO -- what comes so late counts as now
local SLOW = 10 -- seconds for which calls begin slowly after a pause where there is no rate
local BASE = 1e15 -- amounts are high * BASE + low
local BORN = 1735689600 -- epochs are seconds since 2025 began, or one more than the last
local FENCES = 4294967296 -- fences of one epoch

local EVERYBODYS = { calls = true, seconds = true, tokens = true, cost = true }

local floor, format -- looked up by the first call: some servers have no standard library while they load a text

-- The one place where time is read.
local function server_micros()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Who answers: the same for as long as the server process lives. A local of a library outlives the call.
local run_id

local function server_run()
  if not run_id then
    run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)') or 'unknown'
  end
  return run_id
end

-- ------------------------------------------------------------------ what one call has read and changed

local K, now, wall, meta
local cells, changed -- of STATE, by field; false: there is none
local rings, ringed -- of RING
local records, written -- of LEASE, by id
local ends, ended -- of ENDS, by id
local freed, first_freed, is_freed -- lots to look at: a queue from there on, and whether a lot is in it
local hints, tries, more

local function cell(field)
  local found = cells[field]
  if found == nil then
    local raw = redis.call('HGET', K[STATE], field)
    found = raw and cmsgpack.unpack(raw) or false
    cells[field] = found
  end
  return found
end

local function put(field, value)
  cells[field] = value
  changed[field] = true
end

local function ring(field)
  local found = rings[field]
  if found == nil then
    found = tonumber(redis.call('HGET', K[RING], field) or nil) or false
    rings[field] = found
  end
  return found
end

local function put_ring(field, value)
  rings[field] = value
  ringed[field] = true
end

local function record(id)
  local found = records[id]
  if found == nil then
    local raw = redis.call('HGET', K[LEASE], id)
    found = raw and cmsgpack.unpack(raw) or false
    records[id] = found
  end
  return found
end

local function put_record(id, value)
  records[id] = value
  written[id] = true
end

local function free(field)
  if meta.waiting > 0 and not is_freed[field] then
    is_freed[field] = true
    freed[#freed + 1] = field
  end
end

local function end_of(id)
  local found = ends[id]
  if found == nil then
    found = tonumber(redis.call('ZSCORE', K[ENDS], id) or nil) or false
    ends[id] = found
  end
  return found
end

local function expires(id, instant)
  ends[id] = instant
  ended[id] = true
end

local function drop(id)
  put_record(id, false)
  expires(id, false)
end

local function live(id)
  local instant = end_of(id)
  return instant and instant > now
end

local function raise_epoch(seen)
  meta.epoch = math.max(meta.epoch + 1, seen + 1, floor(wall / 1000000) - BORN)
  meta.count = 0
  meta.born = now
end

local function begin_call(keys)
  K, floor, format = keys, math.floor, string.format
  cells, changed, rings, ringed, records, written, ends, ended = {}, {}, {}, {}, {}, {}, {}, {}
  freed, first_freed, is_freed, hints, tries, more = {}, 1, {}, {}, TRIES, 0
  wall = server_micros()
end

local function read_meta()
  local raw = redis.call('HGET', K[STATE], '#')
  meta = raw and cmsgpack.unpack(raw)
  if meta and meta.layout ~= LAYOUT then
    error({ err = 'TOWERMAN_LAYOUT the data of this group have layout ' .. tostring(meta.layout) })
  end
end

-- `seen`: the highest epoch that the asker knows of, or 0; `lease`: how long its leases last.
local function open(keys, seen, lease)
  begin_call(keys)
  read_meta()
  local count = redis.call('HLEN', K[LEASE])
  if not meta or meta.records ~= count or redis.call('ZCARD', K[ENDS]) < count then
    -- Nothing is here yet, or a part of it is gone (evicted, deleted): what is left of it would count for ever.
    redis.call('UNLINK', K[STATE], K[RING], K[LEASE], K[ENDS], K[WAIT], K[REST])
    local before = meta
    now = before and math.max(wall, before.last) or wall
    meta = {
      layout = LAYOUT, run = server_run(), epoch = before and before.epoch or 0, count = 0, born = now,
      ahead = now - wall, last = now, quiet = 0, longest = before and before.longest or 0, ticket = 0, promoted = 0,
      waiting = 0, records = 0, key = before and before.key, reaped = before and before.reaped or 0,
    }
    raise_epoch(seen)
    meta.longest = math.max(meta.longest, lease)
    meta.quiet = (before or seen > 0) and now + meta.longest or 0
    return
  end
  -- A clock that goes back a little stands until it has caught up. By more: it has been set, and what was a moment ago
  -- stays a moment ago.
  now = wall + meta.ahead
  if now < meta.last then
    if now < meta.last - LATE then
      meta.ahead = meta.ahead + meta.last - now
    end
    now = meta.last
    wall = now - meta.ahead
  end
  meta.last = now
  if meta.run ~= server_run() then
    -- Another server answers: grants of the last one may be missing here.
    meta.run = server_run()
    raise_epoch(0)
    meta.quiet = math.max(meta.quiet, now + meta.longest)
  end
  if seen > meta.epoch then -- it knows of grants that these data have forgotten
    raise_epoch(seen)
    meta.quiet = math.max(meta.quiet, now + meta.longest)
  elseif seen > 0 and seen < meta.epoch then -- it may hold some of which they know nothing
    meta.quiet = math.max(meta.quiet, meta.born + meta.longest)
  end
end

-- ------------------------------------------------------------------ access modes: IS, IX, S, X are 0 to 3

local function compatible(counts, mode)
  if counts[4] > 0 then
    return false
  elseif mode == 3 then
    return counts[1] + counts[2] + counts[3] == 0
  elseif mode == 2 then
    return counts[2] == 0
  elseif mode == 1 then
    return counts[3] == 0
  end
  return true
end

local function modes_fit(one, other)
  if one == 3 or other == 3 then
    return false
  end
  return not ((one == 1 and other == 2) or (one == 2 and other == 1))
end

-- ------------------------------------------------------------------ rates
-- A meter is { limit, period, burst, reserve, until, pending, started, serial, a, b, c, calm, its rest, looked after }.
-- Limit 0: it only pauses. Burst -1: an exact window, whose starts are in the ring from a up to b, and out of use from c
-- up to a. Else a bucket: what has begun is used up at a + b / limit. Until is 0 where there was no pause; after one the
-- next may start at calm + rest / limit. A product of an instant and a limit would pass 2^53: hence these two parts.

local function meter_of(field)
  local found = cell(field)
  if not found then
    found = { 0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
    cells[field] = found
  end
  return found
end

-- n * length / limit: the whole part and the rest, in parts of limit. Also for an n below 0.
local function times(n, length, limit)
  local rest = n * (length % limit)
  return n * floor(length / limit) + floor(rest / limit), rest % limit
end

-- whole + rest / limit and n lengths more, each times the limit.
local function plus(m, whole, rest, n, length)
  local limit = math.max(m[1], 1)
  local more_whole, more_rest = times(n, length, limit)
  whole, rest = whole + more_whole, rest + more_rest
  if rest >= limit then
    rest, whole = rest - limit, whole + 1
  end
  if whole >= LAST then
    return LAST, 0
  end
  return whole, rest
end

-- The first whole instant that is not before whole + rest / limit less n lengths, each times the limit.
local function minus(m, whole, rest, n, length)
  local less_whole, less_rest = times(n, length, math.max(m[1], 1))
  return whole - less_whole + (rest > less_rest and 1 or 0)
end

-- Not before that instant.
local function at_least(whole, rest, instant)
  if whole < instant then
    return instant, 0
  end
  return whole, rest
end

local function start(field, index)
  return ring(field .. '\0' .. format('%.0f', index))
end

local function put_start(field, index, value)
  put_ring(field .. '\0' .. format('%.0f', index), value)
end

local function forget_starts(field, m, most)
  while m[11] < m[9] and most > 0 do
    put_start(field, m[11], false)
    m[11] = m[11] + 1
    most = most - 1
  end
end

-- Starts up to an instant are out of every window: the first of the others is searched for by doubled steps.
local function trim(field, m, instant)
  local low, high = m[9], m[10]
  if low >= high or start(field, low) > instant then
    return
  end
  local step = 1
  while low + step < high do
    if start(field, low + step) > instant then
      high = low + step
    else
      low = low + step
      step = step * 2
    end
  end
  while low + 1 < high do
    local middle = floor((low + high) / 2)
    if start(field, middle) > instant then
      high = middle
    else
      low = middle
    end
  end
  m[9] = high
end

local function meter_let_in(field, m)
  if m[1] > 0 and m[3] < 0 then
    trim(field, m, now - m[2])
    forget_starts(field, m, FORGOTTEN)
  end
end

local function meter_begin(field, m, instant)
  if m[1] > 0 and m[3] < 0 then
    put_start(field, m[10], instant)
    m[10] = m[10] + 1
  elseif m[1] > 0 then
    local whole, rest = at_least(m[9], m[10], instant)
    m[9], m[10] = plus(m, whole, rest, 1, m[2])
  end
end

-- A pause ends at that instant: what of a bucket may come together then is used up.
local function meter_use_up(m, instant)
  if m[1] > 0 and m[3] >= 0 then
    local whole, rest = plus(m, instant, 0, m[3] - m[4] - 1, m[2])
    if m[9] < whole or (m[9] == whole and m[10] < rest) then
      m[9], m[10] = whole, rest
    end
  end
end

-- How far apart starts are at an instant for the sake of the last pause, times the limit; 0: not any more.
local function meter_gap(m, instant)
  if m[5] == 0 or (m[1] > 0 and m[3] >= 0) then -- for a bucket its even pace is enough
    return 0
  elseif m[1] > 0 then
    return instant < m[5] + m[2] and m[2] or 0
  end
  local passed = floor((instant - m[5]) / MICRO)
  return passed < SLOW and floor(MICRO / 2 ^ math.max(0, passed)) or 0
end

-- When what the last pause has left is over.
local function meter_eased(m)
  if m[5] == 0 or (m[1] > 0 and m[3] >= 0) then
    return m[5]
  end
  return m[5] + (m[1] > 0 and m[2] or SLOW * MICRO)
end

-- The earliest instant at which one more may start by what the last pause has left.
local function meter_eased_at(m, high)
  local gap = meter_gap(m, math.max(now, m[5]))
  if gap == 0 then
    return 0
  end
  local room = (high and m[4] or 0) - m[6]
  if room < 0 then
    return meter_eased(m)
  end
  return math.min(meter_eased(m), minus(m, m[12], m[13], room, gap))
end

-- Microseconds until one more may start, at least: so long if those that were let in begin now. 0: it may.
local function meter_free_in(field, m, high)
  local instant = now
  if m[1] > 0 and m[3] < 0 then
    local count = m[10] - m[9]
    local over = count + m[6] - (high and m[1] or m[1] - m[4])
    if over >= count then
      instant = now + m[2]
    elseif over >= 0 then
      instant = start(field, m[9] + over) + m[2]
    end
  elseif m[1] > 0 then
    local room = (high and m[3] or m[3] - m[4]) - 1 - m[6]
    local whole, rest = m[9], m[10]
    if room < 0 then
      whole, rest = at_least(whole, rest, now)
    end
    instant = minus(m, whole, rest, room, m[2])
  end
  return math.min(math.max(instant, meter_eased_at(m, high), m[5], now) - now, NEVER)
end

-- How many starts of the present explain what a bucket remembers; no more than its burst, the rest is of a pause.
local function bucket_used(m)
  local low, high = 0, m[3]
  while low < high do
    local middle = floor((low + high) / 2)
    if minus(m, m[9], m[10], middle, m[2]) <= now then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- The rule gets other numbers and keeps its past, as far as it can have it.
local function meter_change(field, m, one)
  local felt = m[5] > now or meter_gap(m, now) > 0
  local windows = m[1] > 0 and m[3] < 0 and one[2] > 0 and one[4] < 0
  local starts, used = {}, 0
  if m[1] > 0 and m[3] < 0 then
    trim(field, m, now - m[2])
    if not windows then -- else they stay where they are
      for index = m[9], m[10] - 1 do
        starts[#starts + 1] = start(field, index)
      end
      m[9] = m[10]
      forget_starts(field, m, NEVER)
    end
  elseif m[1] > 0 then
    used = bucket_used(m)
  end
  if m[13] > 0 then -- rounded up
    m[12], m[13] = m[12] + 1, 0
  end
  m[1], m[2], m[3], m[4] = one[2], one[3], one[4], one[5]
  if not windows then
    m[9], m[10], m[11] = 0, 0, 0
  end
  for _, instant in ipairs(starts) do
    meter_begin(field, m, instant)
  end
  if used > 0 and m[1] > 0 and m[3] >= 0 then
    m[9], m[10] = plus(m, now, 0, used, m[2])
  else
    for _ = 1, used do
      meter_begin(field, m, now)
    end
  end
  if felt then
    meter_use_up(m, math.max(m[5], now))
  end
  meter_let_in(field, m)
  put(field, m)
end

-- What was claimed as { key, limit, period, burst, reserve, enforced }; `anew`: these numbers are in force from now on.
local function meter_for(one, anew)
  local field = 'm' .. one[1]
  local m = meter_of(field)
  if
    m[1] ~= one[2] and (anew or m[1] == 0)
    or anew and (m[2] ~= one[3] or m[3] ~= one[4] or m[4] ~= one[5])
  then
    meter_change(field, m, one)
  end
  return m, field
end

local function meter_begun(mark)
  local field = 'm' .. mark[1]
  local m = meter_of(field)
  m[6], m[7] = m[6] - 1, m[7] + 1
  meter_begin(field, m, now)
  if m[5] > 0 and now >= m[5] then
    local whole, rest = at_least(m[12], m[13], now)
    m[12], m[13] = plus(m, whole, rest, 1, meter_gap(m, now))
  end
  put(field, m)
  free(field) -- others learn when they may start
end

local function meter_take_back(mark)
  local field = 'm' .. mark[1]
  local m = meter_of(field)
  m[6] = m[6] - 1
  if m[3] >= 0 and m[8] ~= mark[2] then -- only the newest leaves no trace
    meter_begin(field, m, now)
  end
  put(field, m)
  free(field)
end

-- Says whether that is longer than it was.
local function meter_pause(field, instant)
  local m = meter_of(field)
  if instant <= m[5] then
    return false
  end
  m[5], m[12], m[13] = instant, instant, 0
  meter_use_up(m, instant)
  put(field, m)
  return true
end

-- When nothing of it is of any use any more; nil while that depends on others.
local function meter_rests(field, m)
  if m[6] > 0 then
    return nil
  end
  local instant = meter_eased(m)
  if m[1] > 0 and m[3] < 0 then
    if m[10] > m[9] then
      instant = math.max(instant, start(field, m[10] - 1) + m[2])
    end
  elseif m[1] > 0 then
    instant = math.max(instant, m[9] + (m[10] > 0 and 1 or 0))
  end
  return instant
end

-- ------------------------------------------------------------------ breakers
-- A fuse is { failures, window, open for, probes, until, generation, probing, well, opened, first, next, looked after }; until is -1
-- while it is closed; instants of failures are in the ring from first up to next.

local function fuse_clear(field, f)
  for index = f[10], f[11] - 1 do
    put_start(field, index, false)
  end
  f[10], f[11] = 0, 0
end

local function fuse_change(field, f)
  f[6], f[7], f[8] = f[6] + 1, 0, 0
  fuse_clear(field, f)
end

local function fuse_open(field, f)
  f[5], f[9] = now + f[3], f[9] + 1
  fuse_change(field, f)
end

local function fuse_close_if_well(field, f)
  if f[5] >= 0 and f[8] >= f[4] then
    f[5] = -1
    fuse_change(field, f)
  end
end

-- What was claimed as { key, failures, window, open for, probes }; `anew`: these numbers are in force from now on.
local function fuse_for(one, anew)
  local field = 'b' .. one[1]
  local f = cell(field)
  if not f then
    f = { one[2], one[3], one[4], one[5], -1, 0, 0, 0, 0, 0, 0, 0 }
    cells[field] = f
  elseif anew and (f[1] ~= one[2] or f[2] ~= one[3] or f[3] ~= one[4] or f[4] ~= one[5]) then
    if f[5] >= 0 then
      f[5] = f[5] + one[4] - f[3]
    end
    f[1], f[2], f[3], f[4] = one[2], one[3], one[4], one[5]
    fuse_close_if_well(field, f)
    put(field, f)
  end
  return f, field
end

local function fuse_lets(f)
  return f[5] < 0 or (now >= f[5] and f[7] + f[8] < f[4])
end

-- Verdicts: 'well', 'failed', 'nothing'. Says whether the breaker has opened by that.
local function fuse_back(mark, verdict)
  local field = 'b' .. mark[1]
  local f = cell(field)
  if not f and mark[2] == 0 then -- it has rested meanwhile and was forgotten
    f = fuse_for({ mark[1], mark[3], mark[4], mark[5], mark[6] })
  end
  if not f or f[6] ~= mark[2] then
    return false
  end
  if f[5] < 0 then
    if verdict ~= 'failed' then
      return false
    end
    put_start(field, f[11], now)
    f[11] = f[11] + 1
    while start(field, f[10]) <= now - f[2] do
      put_start(field, f[10], false)
      f[10] = f[10] + 1
    end
    put(field, f)
    if f[11] - f[10] < f[1] then
      return false
    end
    fuse_open(field, f)
    return true
  end
  f[7] = f[7] - 1
  put(field, f)
  if verdict == 'failed' then
    fuse_open(field, f)
    return true
  elseif verdict == 'well' then
    f[8] = f[8] + 1
    fuse_close_if_well(field, f)
  end
  return false
end

-- ------------------------------------------------------------------ budgets
-- An account is { e = end of its window or -1, w = instant at which it was noticed to have begun, p = which windows,
-- u = units, l = loose units }, a unit is { spent high, spent low, reserved high, reserved low }. A share is what one call has of the accounts on its chain.

local function amount(text)
  if #text <= 15 then
    return 0, tonumber(text)
  end
  return tonumber(string.sub(text, 1, -16)), tonumber(string.sub(text, -15))
end

local function add(high, low, other_high, other_low)
  high, low = high + other_high, low + other_low
  if low >= BASE then
    return high + 1, low - BASE
  end
  return high, low
end

local function take_from(high, low, other_high, other_low)
  high, low = high - other_high, low - other_low
  if low < 0 then
    return high - 1, low + BASE
  end
  return high, low
end

local function less(high, low, other_high, other_low)
  return high < other_high or (high == other_high and low < other_low)
end

-- Days since 1970 of the first of a month, March being month 0 of its year.
local function days(year, month)
  if month < 3 then
    year, month = year - 1, month + 12
  end
  local first = floor((153 * (month - 3) + 2) / 5)
  return 365 * year + floor(year / 4) - floor(year / 100) + floor(year / 400) + first - 719468
end

local DAY = 86400000000

-- Microseconds until the window of the calendar ends. Windows: a length, or -1 for months, -2 for weeks from Mondays.
local function window_left(per)
  if per == -2 then
    return 7 * DAY - (wall - 4 * DAY) % (7 * DAY)
  elseif per ~= -1 then
    return per - wall % per
  end
  local day = floor(wall / DAY)
  local year = 1970 + floor(day / 366)
  local month = 1
  while days(year + 1, 1) <= day do
    year = year + 1
  end
  while month < 12 and days(year, month + 1) <= day do
    month = month + 1
  end
  local after = month == 12 and days(year + 1, 1) or days(year, month + 1)
  return after * DAY - wall
end

local function account_for(key, per)
  local field = 'a' .. key
  local account = cell(field)
  if not account then
    account = { e = per == 0 and -1 or now + window_left(per), w = now, p = per, u = {}, l = {}, s = 0 }
    cells[field] = account
    return account, field
  end
  if account.e >= 0 and now >= account.e then
    account.e, account.w = now + window_left(account.p), now
    for _, unit in pairs(account.u) do
      unit[1], unit[2] = 0, 0
    end
    put(field, account)
  end
  if per ~= account.p then
    account.p = per
    account.e = per == 0 and -1 or now + window_left(per)
    put(field, account)
  end
  return account, field
end

local function unit_of(account, name)
  local unit = account.u[name]
  if not unit then
    unit = { 0, 0, 0, 0 }
    account.u[name] = unit
  end
  return unit
end

local function stops(account, name)
  return EVERYBODYS[name] or account.l[name]
end

-- By unit what a call asks; and those of more than 0.
local function parsed(asks)
  local by, some = {}, {}
  for _, one in ipairs(asks) do
    local high, low = amount(one[2])
    by[one[1]] = { high, low }
    if high > 0 or low > 0 then
      some[#some + 1] = { one[1], high, low }
    end
  end
  return by, some
end

-- The unit of an account, limited as { key, windows, partial, { unit, limit }, ... }, that lacks; `closed` or nil.
local function lacks(account, limited, by, closed, index)
  for place = 4, #limited do
    local name = limited[place][1]
    local high, low = amount(limited[place][2])
    local unit = account.u[name] or { 0, 0, 0, 0 }
    local asked = by[name]
    if not asked then
      if not less(unit[1], unit[2], high, low) and stops(account, name) then
        return name
      end
    elseif asked[1] > 0 or asked[2] > 0 then
      if closed and closed[index .. ' ' .. name] then
        return name
      end
      local left_high, left_low = take_from(high, low, unit[1], unit[2])
      left_high, left_low = take_from(left_high, left_low, unit[3], unit[4])
      if less(left_high, left_low, asked[1], asked[2]) then
        return name
      end
    end
  end
  return nil
end

-- A call has reserved what it asks and is about to start: the unit of which there is too little after all.
local function in_the_way(account, limited, by)
  for place = 4, #limited do
    local name = limited[place][1]
    local high, low = amount(limited[place][2])
    local unit = account.u[name] or { 0, 0, 0, 0 }
    local asked = by[name]
    if not asked then
      if not less(unit[1], unit[2], high, low) and stops(account, name) then
        return name
      end
    elseif asked[1] > 0 or asked[2] > 0 then
      local spent_high, spent_low = add(unit[1], unit[2], asked[1], asked[2])
      if less(high, low, spent_high, spent_low) then
        return name
      end
    end
  end
  return nil
end

local function reserve_units(chain, some, sign)
  for _, one in ipairs(chain) do
    local account, field = account_for(one[1], one[2])
    for _, ask in ipairs(some) do
      local unit = unit_of(account, ask[1])
      if sign > 0 then
        unit[3], unit[4] = add(unit[3], unit[4], ask[2], ask[3])
      else
        unit[3], unit[4] = take_from(unit[3], unit[4], ask[2], ask[3])
      end
    end
    put(field, account)
  end
end

-- A window that has ended has forgotten what was spent in it.
local function unspend(share, name, high, low)
  for place, one in ipairs(share.c) do
    local account, field = account_for(one[1], one[2])
    if share.w[place] == account.w then
      local unit = unit_of(account, name)
      unit[1], unit[2] = take_from(unit[1], unit[2], high, low)
      put(field, account)
    end
  end
end

local function share_lack(share, chain)
  local by = parsed(share.q)
  for place, limited in ipairs(chain) do
    local name = in_the_way(account_for(limited[1], limited[2]), limited, by)
    if name then
      return place, name
    end
  end
  return nil
end

local function share_spend(share)
  local _, some = parsed(share.q)
  share.t, share.w = 2, {}
  for place, one in ipairs(share.c) do
    local account, field = account_for(one[1], one[2])
    for _, ask in ipairs(some) do
      local unit = unit_of(account, ask[1])
      unit[3], unit[4] = take_from(unit[3], unit[4], ask[2], ask[3])
      unit[1], unit[2] = add(unit[1], unit[2], ask[2], ask[3])
    end
    share.w[place] = account.w
    put(field, account)
  end
end

local function share_refund(share)
  local _, some = parsed(share.q)
  if share.t == 1 then
    reserve_units(share.c, some, -1)
  elseif share.t == 2 then
    for _, ask in ipairs(some) do
      unspend(share, ask[1], ask[2], ask[3])
    end
  else
    return
  end
  share.t, share.w = 0, {}
end

local function share_settle(share)
  if share.t ~= 2 then
    return
  end
  local by = parsed(share.q)
  share.t = 3
  for name, charged in pairs(share.x) do
    local asked = by[name]
    if asked and less(charged[1], charged[2], asked[1], asked[2]) then
      unspend(share, name, take_from(asked[1], asked[2], charged[1], charged[2]))
    end
  end
  share.x, share.w = {}, {}
end

local function charge_accounts(chain, some)
  for _, one in ipairs(chain) do
    local account, field = account_for(one[1], one[2])
    for _, ask in ipairs(some) do
      local unit = unit_of(account, ask[1])
      unit[1], unit[2] = add(unit[1], unit[2], ask[2], ask[3])
      if not EVERYBODYS[ask[1]] then
        account.l[ask[1]] = true
      end
    end
    put(field, account)
  end
end

local function share_charge(share, amounts)
  local _, some = parsed(amounts)
  if share.t == 3 then
    charge_accounts(share.c, some)
  end
  if share.t ~= 2 then
    return
  end
  local by = parsed(share.q)
  local beyond = {}
  for _, one in ipairs(some) do
    local name = one[1]
    local had, asked = share.x[name] or { 0, 0 }, by[name] or { 0, 0 }
    local high, low = add(had[1], had[2], one[2], one[3])
    share.x[name] = { high, low }
    local from = less(had[1], had[2], asked[1], asked[2]) and asked or had
    if less(from[1], from[2], high, low) then
      beyond[#beyond + 1] = { name, take_from(high, low, from[1], from[2]) }
    end
  end
  for _, one in ipairs(amounts) do -- a charge of nothing is one all the same: what was asked goes back at the end
    share.x[one[1]] = share.x[one[1]] or { 0, 0 }
  end
  charge_accounts(share.c, beyond)
end

-- ------------------------------------------------------------------ what is in the way of an ask
-- An ask is { p = { key, permits, limit, reserve }, h = { key, mode }, r = rates, b = breakers, y = priority,
-- s = share or '', c = chain as limited now }, each of p, h, r, b, c a list.

-- The lot, its kind, the place in the ask, and microseconds that it lasts at least, where that is known.
local function blocker(ask)
  local high = ask.y > 0
  for place, one in ipairs(ask.p) do
    local pool = cell('p' .. one[1])
    if (pool and pool[1] or 0) + one[2] > one[3] - (high and 0 or one[4]) then
      return 'p' .. one[1], 'p', place, 0
    end
  end
  for place, one in ipairs(ask.h) do
    local node = cell('n' .. one[1])
    if node and not compatible(node, one[2]) then
      return 'n' .. one[1], 'n', place, 0
    end
    if one[2] == 3 and now < meta.quiet then
      return 'q', 'q', place, meta.quiet - now
    end
  end
  for place, one in ipairs(ask.r) do
    local m, field = meter_for(one)
    if one[6] == 1 then
      local left = meter_free_in(field, m, high)
      if left > 0 then
        return field, 'm', place, left
      end
    end
  end
  return nil
end

-- Would work that goes on after its result was sealed keep this waiter waiting all alone?
local function barred(claimant)
  local kind = string.sub(claimant.f, 1, 1)
  if kind == 'm' or kind == 'q' then -- only time is in its way
    return true
  end
  local state = cell(claimant.f)
  if not state then
    return false
  end
  local key = string.sub(claimant.f, 2)
  for _, one in ipairs(kind == 'p' and claimant.p or claimant.h) do
    if one[1] == key then
      if kind == 'p' then
        return state[2] + one[2] > one[3] - (claimant.y > 0 and 0 or one[4])
      end
      return #state > 4 and not compatible({ state[5], state[6], state[7], state[8] }, one[2])
    end
  end
  return false
end

-- What is free by count but claimed by a waiter that was promoted before; an unpromoted one gives way to those of its
-- class or a higher one.
local function hidden(ask, promotion)
  local claimants = cell('!')
  if not claimants then
    return nil
  end
  local totals, rooms = {}, {}
  for _, claimant in ipairs(claimants) do
    if promotion > 0 and claimant.n >= promotion then
      break
    end
    if (promotion > 0 or claimant.y >= ask.y) and not barred(claimant) then
      for _, wanted in ipairs(claimant.p) do
        for place, one in ipairs(ask.p) do
          if one[1] == wanted[1] then
            local pool = cell('p' .. one[1])
            totals[place] = (totals[place] or (pool and pool[1] or 0) + one[2]) + wanted[2]
            rooms[place] = math.min(
              rooms[place] or one[3] - (ask.y > 0 and 0 or one[4]),
              wanted[3] - (claimant.y > 0 and 0 or wanted[4])
            )
            if totals[place] > rooms[place] then
              return 'p' .. one[1], 'p', place, 0
            end
          end
        end
      end
      for _, wanted in ipairs(claimant.h) do
        for place, one in ipairs(ask.h) do
          if one[1] == wanted[1] and not modes_fit(one[2], wanted[2]) then
            return 'n' .. one[1], 'n', place, 0
          end
        end
      end
    end
  end
  return nil
end

-- A refusal that waiting does not change, or nil.
local function refusal(ask)
  for place, one in ipairs(ask.b) do
    local f = fuse_for(one)
    if not fuse_lets(f) then
      return { 0, 'b', place, math.max(0, f[5] - now) }
    end
  end
  for place, one in ipairs(ask.p) do
    if one[2] > one[3] - (ask.y > 0 and 0 or one[4]) then
      return { 0, 'h', place, 0 }
    end
  end
  return nil
end

-- What an ask needs of its share, or why there is too little.
local function budget_refusal(ask)
  if ask.s == '' then
    return nil
  end
  local share = record(ask.s)
  if not share or share.k ~= 's' or not live(ask.s) then
    return { 0, 'l', 0, 0 } -- its reservation has expired
  end
  if share.t ~= 1 and share.t ~= 2 then
    return { 0, 'l', 0, 0 } -- it has given back what it had
  end
  local place, name
  if share.t == 1 then
    place, name = share_lack(share, ask.c)
  end
  return place and { 0, 'a', place, name }
end

-- ------------------------------------------------------------------ taking and giving
-- A record is { k = kind, ... }: h held, o offered, w waiting, x refused while it waited, s a share. Since when: j it waits,
-- l it has what it has.

local function take(r)
  for _, one in ipairs(r.p) do
    local field = 'p' .. one[1]
    local pool = cell(field) or { 0, 0 }
    pool[1] = pool[1] + one[2]
    put(field, pool)
  end
  for _, one in ipairs(r.h) do
    local field = 'n' .. one[1]
    local node = cell(field) or { 0, 0, 0, 0 }
    node[one[2] + 1] = node[one[2] + 1] + 1
    put(field, node)
  end
  r.m, r.b = {}, {}
  for _, one in ipairs(r.a.r) do
    local m, field = meter_for(one)
    m[6], m[8] = m[6] + 1, m[8] + 1
    meter_let_in(field, m)
    put(field, m)
    r.m[#r.m + 1] = { one[1], m[8] }
  end
  for _, one in ipairs(r.a.b) do
    local f, field = fuse_for(one)
    if f[5] >= 0 then
      f[7] = f[7] + 1
      put(field, f)
    end
    r.b[#r.b + 1] = { one[1], f[6], one[2], one[3], one[4], one[5] }
  end
  if r.a.s ~= '' then
    local share = record(r.a.s)
    if share.t == 1 then
      share_spend(share)
      put_record(r.a.s, share)
      r.s = r.a.s
    end
  end
  meta.count = meta.count + 1
  if meta.count >= FENCES then
    meta.epoch, meta.count = meta.epoch + 1, 1
  end
  r.g, r.o, r.e, r.n, r.l = 0, 0, meta.epoch, meta.count, now
end

local function orphan(r, step)
  r.o = r.o + step
  for _, one in ipairs(r.p) do
    local pool = cell('p' .. one[1])
    pool[2] = pool[2] + step * one[2]
    put('p' .. one[1], pool)
  end
  for _, one in ipairs(r.h) do
    local node = cell('n' .. one[1])
    for place = #node + 1, 8 do
      node[place] = 0
    end
    node[one[2] + 5] = node[one[2] + 5] + step
    put('n' .. one[1], node)
  end
end

local function give(r)
  if r.o > 0 then
    orphan(r, -1)
  end
  for _, one in ipairs(r.p) do
    local field = 'p' .. one[1]
    local pool = cell(field)
    pool[1] = pool[1] - one[2]
    put(field, pool[1] ~= 0 and pool or false)
    free(field)
  end
  for _, one in ipairs(r.h) do
    local field = 'n' .. one[1]
    local node = cell(field)
    node[one[2] + 1] = node[one[2] + 1] - 1
    put(field, node[1] + node[2] + node[3] + node[4] ~= 0 and node or false)
    free(field)
  end
end

local function begin(r)
  r.g = 1
  for _, mark in ipairs(r.m) do
    meter_begun(mark)
  end
end

-- Says which of its breakers have opened, by place.
local function hear(r, verdict)
  local opened = {}
  for place, mark in ipairs(r.b) do
    if fuse_back(mark, verdict) then
      opened[#opened + 1] = place
    end
  end
  r.b = {}
  return opened
end

-- As if it had never been taken.
local function undo(r)
  for _, mark in ipairs(r.m) do
    meter_take_back(mark)
  end
  hear(r, 'nothing')
  local share = r.s and record(r.s)
  if share and share.t == 2 then
    share_refund(share)
    local _, some = parsed(share.q)
    reserve_units(share.c, some, 1)
    share.t = 1
    put_record(r.s, share)
  end
  r.s = nil
  give(r)
end

-- ------------------------------------------------------------------ waiting
-- A waiter is parked in the lot of the first thing in its way: a member `field \0 rank \0 id` of one sorted set, in
-- order of bytes. Rank: class, promotion, ticket. Lot passes are counted once for all who stand in it.

local function rank(r)
  return format('%05.0f%016.0f%016.0f', 50000 - r.a.y, r.u > 0 and r.u or NEVER, r.i)
end

local function member(id, r)
  return r.f .. '\0' .. rank(r) .. '\0' .. id
end

local function lot_passes(field)
  local found = cell('~' .. field)
  return found and found[1] or 0
end

local function claim_all(id, r)
  local claimants = cell('!') or {}
  local place = 1
  while claimants[place] and claimants[place].n < r.u do
    place = place + 1
  end
  table.insert(claimants, place, { n = r.u, y = r.a.y, p = r.p, h = r.h, f = r.f, id = id })
  put('!', claimants)
end

local function unclaim(id, r)
  local claimants = cell('!')
  for place, claimant in ipairs(claimants or {}) do
    if claimant.id == id then
      table.remove(claimants, place)
      put('!', #claimants > 0 and claimants or false)
      for _, one in ipairs(r.p) do -- what was hidden is there for others
        free('p' .. one[1])
      end
      for _, one in ipairs(r.h) do
        free('n' .. one[1])
      end
      return
    end
  end
end

local function park(id, r, field)
  r.k, r.f, r.z = 'w', field, lot_passes(field)
  redis.call('ZADD', K[WAIT], 0, member(id, r))
  if r.u > 0 and r.q == 0 then
    claim_all(id, r)
  end
end

local function unpark(id, r)
  redis.call('ZREM', K[WAIT], member(id, r))
  if r.u > 0 then
    unclaim(id, r)
  end
  r.v = r.v + lot_passes(r.f) - r.z
  if changed['~' .. r.f] or cell('~' .. r.f) then
    if redis.call('ZLEXCOUNT', K[WAIT], '[' .. r.f .. '\0', '(' .. r.f .. '\0\255') == 0 then
      put('~' .. r.f, false)
    end
  end
end

local function passes(r)
  return r.v + lot_passes(r.f) - r.z
end

local function promote(id, r)
  local claimants = cell('!')
  if r.u == 0 and passes(r) >= PASSES and #(claimants or {}) < CLAIMANTS then
    local field = r.f
    unpark(id, r)
    meta.promoted = meta.promoted + 1
    r.u = meta.promoted
    park(id, r, field)
    put_record(id, r)
  end
end

local function heads(field, most)
  return redis.call('ZRANGEBYLEX', K[WAIT], '[' .. field .. '\0', '(' .. field .. '\0\255', 'LIMIT', 0, most)
end

local function id_of(field, text)
  return string.sub(text, #field + 40)
end

-- Somebody got some of what these wait for: the first of each lot was passed, and those behind it with it.
local function count_passes(ask, own_rank)
  if meta.waiting == 0 then
    return
  end
  local function passed(field)
    local first = heads(field, 1)[1]
    if first then
      local id = id_of(field, first)
      local r = record(id)
      -- A call of a higher class passes as well; one that ranks before it in its own class does not.
      if r and r.k == 'w' and (ask.y > r.a.y or own_rank > rank(r)) then
        put('~' .. field, { lot_passes(field) + 1 })
        promote(id, r)
      end
    end
  end
  for _, one in ipairs(ask.p) do
    passed('p' .. one[1])
  end
  for _, one in ipairs(ask.h) do
    passed('n' .. one[1])
  end
  for _, one in ipairs(ask.r) do
    passed('m' .. one[1])
  end
end

local function hint(r, id)
  if r.w ~= '' then
    hints[#hints + 1] = { r.w, id }
  end
end

-- A waiter is looked at: it is offered what it wants, refused, moved to another lot, or it stays. Says whether it left.
local function try(id, r)
  tries = tries - 1
  if not live(id) then
    unpark(id, r)
    meta.waiting = meta.waiting - 1
    drop(id)
    return true
  end
  if r.q > 0 then -- it has declined and not asked again
    return false
  end
  local no = refusal(r.a)
  local field
  if not no then
    field = blocker(r.a)
    if not field then
      field = hidden(r.a, r.u)
    end
    if field == r.f then
      return false
    elseif field then
      unpark(id, r)
      r.v = r.v + 1 -- tried in vain
      park(id, r, field)
      promote(id, r)
      put_record(id, r)
      return true
    end
    no = budget_refusal(r.a)
  end
  unpark(id, r)
  meta.waiting = meta.waiting - 1
  if no then
    r.k, r.no = 'x', no
  else
    take(r)
    r.k = 'o'
    r.t = end_of(id) -- as a waiter it is alive so long
    expires(id, now + r.d)
    count_passes(r.a, rank(r))
  end
  put_record(id, r)
  hint(r, id)
  return true
end

-- Whoever stands behind this one needs no less: it would be tried in vain.
local function wants_least(r, field)
  for _, one in ipairs(string.sub(field, 1, 1) == 'p' and r.p or {}) do
    if one[2] == 1 and 'p' .. one[1] == field then
      return true
    end
  end
  return false
end

local function pump()
  while freed[first_freed] and tries > 0 and meta.waiting > 0 do
    local field = freed[first_freed]
    is_freed[field] = nil
    first_freed = first_freed + 1
    local left = 0
    for _, text in ipairs(heads(field, AHEAD)) do
      local id = id_of(field, text)
      local r = record(id)
      if not r or r.k ~= 'w' or member(id, r) ~= text then
        redis.call('ZREM', K[WAIT], text)
        left = left + 1
      elseif try(id, r) then
        left = left + 1
      elseif r.q == 0 and wants_least(r, field) then
        break
      end
      if tries <= 0 then
        break
      end
    end
    if left > 0 then -- others have come to the front
      free(field)
    end
  end
  if freed[first_freed] and meta.waiting > 0 then
    more = 1
  end
end

-- ------------------------------------------------------------------ what has expired

local function wait_again(id, r)
  undo(r)
  if r.t > now then
    meta.waiting = meta.waiting + 1
    park(id, r, r.f)
    expires(id, r.t)
    put_record(id, r)
    free(r.f)
  else
    drop(id)
  end
end

local function reap(id)
  local r = record(id)
  if not r then
    expires(id, false)
  elseif r.k == 'o' then
    r.q = 1
    wait_again(id, r)
  else
    if r.k == 'h' then
      meta.reaped = (meta.reaped or 0) + 1
      if r.g == 0 then -- whether it began nobody knows; if it did, it was not later than now
        begin(r)
      end
      hear(r, 'nothing')
      give(r)
    elseif r.k == 'w' then
      unpark(id, r)
      meta.waiting = meta.waiting - 1
    elseif r.k == 's' and r.t == 1 then
      share_refund(r)
    end
    drop(id)
  end
end

local function reap_all()
  local found = redis.call('ZRANGEBYSCORE', K[ENDS], '-inf', format('%.0f', now), 'LIMIT', 0, REAPED)
  for _, id in ipairs(found) do
    reap(id)
  end
  if #found == REAPED then
    more = 1
  end
end

-- When a state is to be looked at again, and forgotten if it remembers nothing any more; nil: not before it changes.
local function look_again(field, state)
  local kind = string.sub(field, 1, 1)
  if kind == 'm' then
    return meter_rests(field, state)
  elseif kind == 'b' and state[6] == 0 then
    return state[11] > state[10] and start(field, state[11] - 1) + state[2] or now
  elseif kind == 'a' and state.e >= 0 then
    return state.e
  end
  return nil
end

-- That an instant is noted for a state stands in the state: m[14], f[12], account.s.
local NOTED = { m = 14, b = 12, a = 's' }

-- Some in each call. What is not forgotten is noted anew when it is written.
local function sweep()
  local found = redis.call('ZRANGEBYSCORE', K[REST], '-inf', format('%.0f', now), 'LIMIT', 0, SWEPT)
  for _, field in ipairs(found) do
    redis.call('ZREM', K[REST], field)
    local state = cell(field)
    local kind = string.sub(field, 1, 1)
    if state then
      if kind == 'a' then
        account_for(string.sub(field, 2), state.p)
      end
      local instant = look_again(field, state)
      state[NOTED[kind]] = 0
      if kind ~= 'a' and instant and instant <= now then
        if kind == 'b' then
          fuse_clear(field, state)
          state = false
        elseif state[1] > 0 and state[3] < 0 then
          state[9] = state[10]
          forget_starts(field, state, FORGOTTEN)
          state = state[11] < state[10] and state -- the rest another time
        else
          state = false
        end
      end
      put(field, state)
    end
  end
end

-- One command for many, as long as a call can be.
local function write(command, key, list)
  local done = 0
  for first = 1, #list, 1000 do
    done = done + redis.call(command, key, unpack(list, first, math.min(first + 999, #list)))
  end
  return done
end

local function push(list, one, other)
  list[#list + 1] = one
  list[#list + 1] = other
end

local function save()
  local set, gone, noted = {}, {}, {}
  for field in pairs(changed) do
    local state = cells[field]
    local kind = string.sub(field, 1, 1)
    if state and kind == 'a' then
      local used = next(state.l) ~= nil
      for name, unit in pairs(state.u) do
        if unit[1] + unit[2] + unit[3] + unit[4] == 0 then
          state.u[name] = nil
        else
          used = true
        end
      end
      state = used and state
    end
    if state and NOTED[kind] and state[NOTED[kind]] == 0 then
      local instant = look_again(field, state)
      if instant then
        push(noted, format('%.0f', instant), field)
        state[NOTED[kind]] = 1
      end
    end
    if state then
      push(set, field, cmsgpack.pack(state))
    else
      gone[#gone + 1] = field
    end
  end
  write('ZADD', K[REST], noted)
  write('HDEL', K[STATE], gone)
  local kept, forgotten = {}, {}
  for field in pairs(ringed) do
    if rings[field] then
      push(kept, field, format('%.0f', rings[field]))
    else
      forgotten[#forgotten + 1] = field
    end
  end
  write('HSET', K[RING], kept)
  write('HDEL', K[RING], forgotten)
  local packed, over = {}, {}
  for id in pairs(written) do
    if records[id] then
      push(packed, id, cmsgpack.pack(records[id]))
    else
      over[#over + 1] = id
    end
  end
  meta.records = meta.records + write('HSET', K[LEASE], packed) - write('HDEL', K[LEASE], over)
  local timed, timeless = {}, {}
  for id in pairs(ended) do
    if ends[id] then
      push(timed, format('%.0f', ends[id]), id)
    else
      timeless[#timeless + 1] = id
    end
  end
  write('ZADD', K[ENDS], timed)
  write('ZREM', K[ENDS], timeless)
  push(set, '#', cmsgpack.pack(meta))
  write('HSET', K[STATE], set)
  for _, one in ipairs(hints) do
    redis.call('PUBLISH', one[1], one[2])
  end
end

-- ------------------------------------------------------------------ what can be asked
-- Answers: 1 granted with epoch and number of its fence; 0 refused, by what; 2 waiting, for what; 3 offered with its
-- fence; -1 unknown, or expired.

local ops = {}

local function tell(r)
  if r.k == 'h' then
    return { 1, r.e, r.n }
  elseif r.k == 'o' then
    return { 3, r.e, r.n }
  elseif r.k == 'x' then
    return r.no
  elseif r.k == 'w' then
    local field, kind, place, left = blocker(r.a)
    if not field then
      field, kind, place, left = hidden(r.a, r.u)
    end
    return { 2, kind or 'w', place or 0, left or 0 }
  end
  return { -1 }
end

-- { 'hello', check of the digest key }: a connection begins.
function ops.hello(op)
  if not meta.key then
    meta.key = op[2]
  elseif meta.key ~= op[2] then
    return { -2 }
  end
  return { 1, meta.run }
end

-- { 'claim', id, lease, ask, time to live as a waiter or 0, time of an offer, channel }
function ops.claim(op)
  local id, ask = op[2], op[4]
  local known = record(id)
  if known and not live(id) then
    reap(id)
    known = record(id)
  end
  if known then -- asked before: its answer did not arrive
    return tell(known)
  end
  meta.longest = math.max(meta.longest, op[3])
  for _, one in ipairs(ask.r) do
    meter_for(one, true)
  end
  for _, one in ipairs(ask.b) do
    fuse_for(one, true)
  end
  local no = refusal(ask)
  if no then
    return no
  end
  local field, kind, place, left = blocker(ask)
  if not field then
    field, kind, place, left = hidden(ask, 0)
  end
  if field and op[5] == 0 then
    return { 0, kind, place, left }
  end
  meta.ticket = meta.ticket + 1
  local r = {
    k = 'h', a = ask, p = ask.p, h = ask.h, d = op[6] or 0, w = op[7] or '', i = meta.ticket, u = 0, v = 0,
    q = 0, z = 0, o = 0, j = now,
  }
  if field then
    meta.waiting = meta.waiting + 1
    park(id, r, field)
    put_record(id, r)
    expires(id, now + op[5])
    return { 2, kind, place, left }
  end
  no = budget_refusal(ask)
  if no then
    return no
  end
  take(r)
  expires(id, now + op[3])
  count_passes(ask, rank(r))
  -- Of what it asked, only what is needed to give it back.
  put_record(id, { k = 'h', p = r.p, h = r.h, m = r.m, b = r.b, s = r.s, g = r.g, o = r.o, e = r.e, n = r.n, l = r.l })
  return { 1, r.e, r.n }
end

-- { 'poll', id, time to live }: it still waits, and can be offered something.
function ops.poll(op)
  local id = op[2]
  local r = record(id)
  if not r or r.k == 's' or not live(id) then
    return { -1 }
  end
  if r.k == 'w' then
    expires(id, now + op[3])
    if r.q > 0 then
      r.q = 0
      if r.u > 0 then
        claim_all(id, r)
      end
      put_record(id, r)
    end
    redis.call('ZADD', K[WAIT], 0, member(id, r))
    free(r.f)
    pump()
    r = record(id)
  elseif r.k == 'o' then
    r.t = now + op[3]
    put_record(id, r)
  end
  local answer = r and tell(r) or { -1 }
  if r and r.k == 'x' then
    drop(id)
  end
  return answer
end

-- { 'confirm', id, lease }: what was offered is held.
function ops.confirm(op)
  local id = op[2]
  local r = record(id)
  if not r or not live(id) or not (r.k == 'o' or r.k == 'h') then
    return { -1 }
  end
  if r.k == 'o' then
    put_record(id, { k = 'h', p = r.p, h = r.h, m = r.m, b = r.b, s = r.s, g = r.g, o = r.o, e = r.e, n = r.n, l = r.l })
    expires(id, now + op[3])
  end
  return { 1, r.e, r.n }
end

-- { 'decline', id, time to live }: an offer goes back; it waits on in its place, and is offered nothing until it asks.
function ops.decline(op)
  local id = op[2]
  local r = record(id)
  if not r or not live(id) or r.k ~= 'o' then
    return { -1 }
  end
  r.q, r.t = 1, now + op[3]
  wait_again(id, r)
  return { 2, 'w', 0, 0 }
end

-- { 'begun', id }: its first line was reached.
function ops.begun(op)
  local r = record(op[2])
  if not r or r.k ~= 'h' or not live(op[2]) then
    return { -1 }
  end
  if r.g == 0 then
    begin(r)
    put_record(op[2], r)
  end
  return { 1 }
end

-- { 'verdict', id, verdict }: how it came back, for its breakers. Answers which of them have opened.
function ops.verdict(op)
  local r = record(op[2])
  if not r or r.k ~= 'h' or not live(op[2]) then
    return { -1 }
  end
  local opened = hear(r, op[3])
  put_record(op[2], r)
  return { 1, opened }
end

-- { 'orphan', id, 1 or -1 }: its work goes on after its result was sealed, or no longer.
function ops.orphan(op)
  local r = record(op[2])
  if not r or r.k ~= 'h' or not live(op[2]) then
    return { -1 }
  end
  if (op[3] > 0) ~= (r.o > 0) then
    orphan(r, op[3])
    put_record(op[2], r)
  end
  return { 1 }
end

-- { 'release', id, begun: 1, 0, verdict }: whatever it is, it is over. 1: something of it was left.
function ops.release(op)
  local id = op[2]
  local r = record(id)
  if not r then
    return { 0 }
  elseif not live(id) then
    reap(id)
    if record(id) then
      return ops.release(op)
    end
    return { 0 }
  end
  if r.k == 'w' then
    unpark(id, r)
    meta.waiting = meta.waiting - 1
  elseif r.k == 'o' then
    undo(r)
  elseif r.k == 'h' then
    if r.g == 0 and op[3] == 1 then
      begin(r)
    elseif r.g == 0 then
      for _, mark in ipairs(r.m) do
        meter_take_back(mark)
      end
      local share = r.s and record(r.s)
      if share and share.t == 2 then
        share_refund(share)
        put_record(r.s, share)
      end
    end
    hear(r, op[4])
    give(r)
  end
  if r.k ~= 's' then
    drop(id)
  end
  return { 1 }
end

-- { 'renew', lease, ids }: answers the places of those that are lost.
function ops.renew(op)
  local lost = {}
  for place, id in ipairs(op[3]) do
    local r = record(id)
    if r and (r.k == 'h' or r.k == 's') and live(id) then
      expires(id, now + op[2])
    else
      lost[#lost + 1] = place
    end
  end
  return lost
end

-- { 'pause', key of a rate, microseconds }: nothing starts by it for so long. 1: that is longer than it was.
function ops.pause(op)
  return { meter_pause('m' .. op[2], math.min(now + op[3], NEVER)) and 1 or 0 }
end

-- Those after `before` reserve, as far as units are not closed to them. A batch that is here as a whole is undone as a
-- whole if it may not be run in part.
local function reserve(op, before, closed, is_whole)
  local chain = op[2]
  local short, order, nothing = {}, {}, {}
  local partial = true
  for _, limited in ipairs(chain) do
    account_for(limited[1], limited[2])
    partial = partial and limited[3] == 1
  end
  local keys = {}
  for index, limited in ipairs(chain) do
    keys[index] = { limited[1], limited[2] }
  end
  for place = before + 1, #op do
    local one = op[place]
    local index = place - before
    local by, some = parsed(one[2] or {})
    local vain = not one[2] or record(one[1]) -- it will not start; or its answer did not arrive
    nothing[index] = not one[2]
    for _, need in ipairs(one[3]) do
      if nothing[need] or short[need] then
        vain = true
        nothing[index] = true
      end
    end
    if not vain then
      local lack
      for place_of, limited in ipairs(chain) do
        local name = lacks(cell('a' .. limited[1]), limited, by, closed, place_of)
        if name then
          lack = { place_of, name }
          break
        end
      end
      if lack then
        short[index] = lack
        order[#order + 1] = index
        for place_of, limited in ipairs(chain) do
          for _, ask in ipairs(some) do
            for limit = 4, #limited do
              if limited[limit][1] == ask[1] and lacks(cell('a' .. limited[1]), {
                limited[1], limited[2], limited[3], limited[limit],
              }, { [ask[1]] = { ask[2], ask[3] } }) then
                closed[place_of .. ' ' .. ask[1]] = true
              end
            end
          end
        end
      else
        reserve_units(keys, some, 1)
        put_record(one[1], { k = 's', c = keys, q = one[2], t = 1, w = {}, x = {}, l = now })
        expires(one[1], now + op[3])
      end
    end
  end
  local whole = {}
  if #order > 0 and is_whole and not partial then -- nobody gets anything; who would have is told what was in the way of the first
    local first = short[order[1]]
    order = {}
    for place = before + 1, #op do
      local one = op[place]
      local share = record(one[1])
      if share then
        share_refund(share)
        drop(one[1])
      end
      local index = place - before
      if not nothing[index] then
        order[#order + 1] = index
        short[index] = short[index] or first
      end
    end
    for _, index in ipairs(order) do
      whole[index] = not share_lack({ q = op[before + index][2] }, chain)
    end
  end
  local answer = {}
  for _, index in ipairs(order) do
    answer[#answer + 1] = { index, short[index][1], short[index][2], whole[index] and 1 or 0 }
  end
  return answer
end

-- { 'reserve', chain, lease, { share, asks, needs }, ... } in emitted order; needs are places of earlier ones, from 1.
-- Answers { place, account, unit, whole } of those that get nothing.
function ops.reserve(op)
  return reserve(op, 3, {}, true)
end

-- { 'part', chain, lease, closed, { share, asks, needs }, ... }: some of a batch that is too long for one call. Answers
-- the same and what is closed to those after them, so that the cheaper does not overtake. Whether the rest goes back is
-- up to the asker.
function ops.part(op)
  local closed = {}
  for _, name in ipairs(op[4]) do
    closed[name] = true
  end
  local answer = reserve(op, 4, closed, false)
  local names = {}
  for name in pairs(closed) do
    names[#names + 1] = name
  end
  return { answer, names }
end

local function share_op(act)
  return function(op)
    local share = record(op[2])
    if not share or share.k ~= 's' or not live(op[2]) then
      return { -1 }
    end
    local answer = act(share, op)
    put_record(op[2], share)
    return answer or { 1, share.t }
  end
end

-- { 'begin', share, chain }: what it has reserved is spent, or it is told why not and keeps it.
ops.begin = share_op(function(share, op)
  if share.t == 1 then
    local place, name = share_lack(share, op[3])
    if place then
      return { 0, 'a', place, name }
    end
    share_spend(share)
  end
end)

-- { 'again', share, chain }: reserve once more, for another attempt or after a refund.
ops.again = share_op(function(share, op)
  if share.t == 1 then
    return nil
  end
  share_settle(share)
  local by, some = parsed(share.q)
  for place, limited in ipairs(op[3]) do
    local name = lacks(account_for(limited[1], limited[2]), limited, by)
    if name then
      return { 0, 'a', place, name }
    end
  end
  reserve_units(share.c, some, 1)
  share.t = 1
end)

ops.refund = share_op(share_refund)
ops.settle = share_op(share_settle)

-- { 'drop', share }: nobody knows of it any more: what it has reserved goes back.
function ops.drop(op)
  local share = record(op[2])
  if not share or share.k ~= 's' then
    return { 0 }
  end
  share_refund(share)
  drop(op[2])
  return { 1 }
end

-- { 'charge', share, amounts, number }: numbers of one share rise, and each is heard once.
ops.charge = share_op(function(share, op)
  if op[4] > (share.n or 0) then
    share.n = op[4]
    share_charge(share, op[3])
  end
end)

-- Values as lists of texts, for whoever looks in: a table by name is a list of names and values.
local function shown(value)
  if type(value) == 'number' then
    return format('%.0f', value)
  elseif type(value) ~= 'table' then
    return tostring(value)
  end
  local list = {}
  for place, one in ipairs(value) do
    list[place] = shown(one)
  end
  if #list == 0 then
    local names = {}
    for name in pairs(value) do
      names[#names + 1] = name
    end
    table.sort(names)
    for _, name in ipairs(names) do
      list[#list + 1] = name
      list[#list + 1] = shown(value[name])
    end
  end
  return list
end

-- { 'look', fields }: what is known of these states; '#' is the group itself, '=id' a record.
function ops.look(op)
  local list = {}
  for place, field in ipairs(op[2]) do
    if field == '#' then
      list[place] = shown(meta)
    elseif string.sub(field, 1, 1) == '=' then
      list[place] = shown(record(string.sub(field, 2)) or {})
    else
      if string.sub(field, 1, 1) == 'a' then
        local account = cell(field)
        if account then
          account_for(string.sub(field, 2), account.p)
        end
      end
      list[place] = shown(cell(field) or {})
    end
  end
  return list
end

-- Arguments: the list of what is asked, as JSON; the highest epoch that the asker has seen; its lease. Answers
-- { now, epoch, more, leases that have run out so far }, then one answer for each question.
local function act(keys, args)
  open(keys, tonumber(args[2]), tonumber(args[3]))
  local asked = cjson.decode(args[1])
  reap_all()
  pump()
  local answers = { { format('%.0f', now), meta.epoch, 0, 0 } }
  for place, op in ipairs(asked) do
    answers[place + 1] = ops[op[1]](op)
    pump()
  end
  sweep()
  save()
  answers[1][3], answers[1][4] = more, meta.reaped or 0
  return answers
end

-- ------------------------------------------------------------------ for whoever only looks in

-- A page of a hash by its cursor: { next cursor, { field, value told, when its time is over or '' }, ... }.
local function page(key, cursor, most, timed)
  local found = redis.call('HSCAN', key, cursor, 'COUNT', math.min(most, PAGE))
  local rows = { found[1] }
  for place = 1, #found[2], 2 do
    local field = found[2][place]
    local instant = timed and end_of(field)
    rows[#rows + 1] = { field, shown(cmsgpack.unpack(found[2][place + 1])), instant and format('%.0f', instant) or '' }
  end
  return rows
end

-- { 'records', cursor, most }, { 'states', cursor, most }, { 'record', id }
local views = {
  records = function(op)
    return page(K[LEASE], op[2], op[3], true)
  end,
  states = function(op)
    return page(K[STATE], op[2], op[3], false)
  end,
  record = function(op)
    local instant = end_of(op[2])
    return { op[2], shown(record(op[2]) or {}), instant and format('%.0f', instant) or '' }
  end,
}

-- It writes nothing, not even that somebody was there: also on a replica, and when the server has no memory left. What
-- has expired and was not reaped yet is told as it stands. Answers { now, the group itself }, then one for each question.
local function look(keys, args)
  begin_call(keys)
  read_meta()
  now = meta and math.max(wall + meta.ahead, meta.last) or wall
  local answers = { { format('%.0f', now), shown(meta or {}) } }
  for place, op in ipairs(cjson.decode(args[1])) do
    answers[place + 1] = views[op[1]](op)
  end
  return answers
end

redis.register_function('towerman_0_act', act)
-- The same for those who only give back: also when the server has no memory left.
redis.register_function({ function_name = 'towerman_0_give', callback = act, flags = { 'allow-oom' } })
redis.register_function({ function_name = 'towerman_0_look', callback = look, flags = { 'no-writes', 'allow-stale' } })
