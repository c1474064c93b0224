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
    not_before REAL NOT NULL,
    harmless INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'claimed', 'done', 'unknown', 'cancelled')),
    owner INTEGER,
    claim BLOB UNIQUE,
    attempts INTEGER NOT NULL DEFAULT 0,
    queued_at REAL NOT NULL,
    claimed_at REAL,
    ended_at REAL
);
CREATE INDEX deferred_queue ON deferred (priority DESC, id) WHERE state = 'queued';
CREATE INDEX deferred_claimed ON deferred (owner) WHERE state = 'claimed';
CREATE INDEX deferred_chain ON deferred (chain, position) WHERE state NOT IN ('done', 'cancelled');
