-- Decisions of people about calls. The arguments that they are shown are in the table arguments.
CREATE TABLE approvals (
    id TEXT PRIMARY KEY,
    run_id TEXT NOT NULL,
    tool TEXT NOT NULL,
    call_id TEXT NOT NULL,
    batch INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    tenant TEXT,
    digest BLOB NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'approved', 'denied')),  -- expired: by its time
    asked_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    decided_at REAL,
    decided_by TEXT,
    reason TEXT,
    claimed_at REAL,
    claimed_by INTEGER
);
CREATE INDEX approvals_open ON approvals (asked_at) WHERE state = 'pending';
CREATE INDEX approvals_by_run ON approvals (run_id);
