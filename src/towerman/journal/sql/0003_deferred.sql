-- Calls that a worker runs later. Their arguments are in the table arguments, their answers in the table answers.
CREATE TABLE deferred (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    handle TEXT NOT NULL UNIQUE,
    key BLOB NOT NULL UNIQUE,              -- the identity of the call, as in calls
    digest BLOB,
    tool TEXT NOT NULL,
    run_id TEXT NOT NULL,
    call_id TEXT NOT NULL,
    batch INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    tenant TEXT,
    priority INTEGER NOT NULL,
    chain TEXT,                            -- calls of one chain run one after another
    position INTEGER NOT NULL,
    needs TEXT NOT NULL DEFAULT '',        -- handles of those whose answers it needs, with spaces between
    not_before REAL NOT NULL,
    harmless INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'claimed', 'done', 'unknown', 'cancelled')),
    stop INTEGER NOT NULL DEFAULT 0,       -- somebody has cancelled it while a worker had it
    outcome TEXT,
    code TEXT,
    owner INTEGER,
    claim BLOB UNIQUE,
    attempts INTEGER NOT NULL DEFAULT 0,
    returned INTEGER NOT NULL DEFAULT 0,   -- how often it was given back, since there was no room for it
    queued_at REAL NOT NULL,
    claimed_at REAL,
    ended_at REAL
);
CREATE INDEX deferred_queue ON deferred (priority DESC, id) WHERE state = 'queued';
CREATE INDEX deferred_waiting ON deferred (tool) WHERE state = 'queued';
CREATE INDEX deferred_claimed ON deferred (owner) WHERE state = 'claimed';
CREATE INDEX deferred_unknown ON deferred (key) WHERE state = 'unknown';
CREATE INDEX deferred_chain ON deferred (chain, position) WHERE state NOT IN ('done', 'cancelled');
CREATE INDEX deferred_by_chain ON deferred (chain) WHERE chain IS NOT NULL;
CREATE INDEX deferred_by_run ON deferred (run_id, id);
