"""The ledger of many processes, on an engine that they share.

Theory. A limit that each replica counts alone is not a limit. Here the counts are in one place, and each claim is one
step there: all that a call wants, or nothing. The arithmetic is that of the rooms `ledger`, `rates`, `breaker` and
`budgets`, written once more where the counts are; a suite replays the same random histories against both.

Keys. An admission group is all that may be claimed together: six keys with one hash tag, so that a cluster keeps them
on one node: `towerman:{group}:state` (counts by name: pools, resource nodes, rates, breakers, accounts, lots, and the
group itself), `ring` (starts of exact windows, failures of breakers), `lease` (records by id: grants, offers, waiters,
shares), `ends` (when each record's time is over), `wait` (who stands where), `rest` (what is to be forgotten when).

A claim, in this order: whatever has expired is reaped; a breaker that is open refuses; more than a pool ever gives is
refused; pools, resources, rates are looked at, and the first in the way is named; what a promoted waiter claims is
hidden; what was reserved of the budgets must still be enough. Then all of it is taken, and the fence goes up by one.

States of a record: waiting -> offered -> held -> gone; a waiter may be refused, an offer may be declined or expire and
its waiter stands where it stood. Whoever gives something back looks, in the same step, at those who wait for it, in
order of rank: class, promotion, coming. One that was passed 16 times is promoted and hides what it needs from others.

Time is the server's. Clients send lengths, never instants. If the server's clock goes back, what was a moment ago stays
a moment ago (by up to a second: it stands until it has caught up); if it jumps ahead, leases end early, and their
holders are told.

No call of the server does much at once: what has expired, waiters and questions are so many at a time, and a very long
batch reserves its budgets in parts.

What is promised, while the data survive: no limit is exceeded, whoever dies gives back within its lease, a fence never
goes back. What is not: a server that loses writes (a replica that is promoted, a file that is some seconds old) has
forgotten grants. Then the epoch, which stands before the fence, goes up, and exclusive grants are held back for as long
as the longest lease, so that whoever holds one has been told that it is lost; shared grants and permits are not held
back. Data of which a part is gone (an eviction) count as lost as a whole: the server must not evict.

Files: `claim.lua` (the rules), `library` (its name and text), `words` (asks and answers), `line` (one connection),
`heart` (renewals), `redis` (claims of one process).

House rules. Importing this room imports no client. Keys of resources are digested before they leave the process.

Not here: who may wait and how long, what is local (elsewhere, gate), when to ask (runner).
"""
