-- Facts about the file itself: the key of its digests, when it was made.
CREATE TABLE facts (
    name TEXT PRIMARY KEY,
    value BLOB NOT NULL
) WITHOUT ROWID;

-- Processes that write here: who is told from whom by number, start, boot and pid namespace; a sign of life.
CREATE TABLE owners (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    host TEXT NOT NULL,
    boot TEXT NOT NULL,
    space TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started TEXT NOT NULL,
    since REAL NOT NULL,
    beat REAL NOT NULL,
    ended REAL
);

-- Intents and what came of them. No value of an argument or a result is here.
CREATE TABLE calls (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key BLOB NOT NULL UNIQUE,              -- keyed digest of the identity; random for a call that has none
    token BLOB NOT NULL UNIQUE,            -- the latest start
    owner INTEGER NOT NULL REFERENCES owners (id),
    state TEXT NOT NULL CHECK (state IN ('open', 'done', 'unknown', 'settled')),
    earlier TEXT CHECK (earlier IN ('open', 'unknown', 'settled')),  -- the state before the latest start, if it was not the first
    running INTEGER NOT NULL DEFAULT 0,    -- of an unknown one: its work went on after its result was sealed
    tool TEXT NOT NULL,
    run_id TEXT NOT NULL,
    batch INTEGER NOT NULL,
    slot INTEGER NOT NULL,
    call_id TEXT NOT NULL,
    tenant TEXT,
    digest BLOB,                           -- keyed digest of the arguments
    harmless INTEGER NOT NULL,
    effect_free INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 1,
    intended_at REAL NOT NULL,
    ended_at REAL,
    outcome TEXT,
    code TEXT,
    applied TEXT NOT NULL DEFAULT 'unknown' CHECK (applied IN ('no', 'yes', 'unknown')),
    settled_at REAL,
    settled_by TEXT,
    note TEXT
);
CREATE INDEX calls_not_done ON calls (id) WHERE state IN ('open', 'unknown');
CREATE INDEX calls_by_run ON calls (run_id, id);
CREATE INDEX calls_by_end ON calls (ended_at) WHERE state IN ('done', 'settled');
CREATE INDEX calls_by_owner ON calls (owner);

-- Values, and nowhere else: what calls were answered, ...
CREATE TABLE answers (
    kind TEXT NOT NULL CHECK (kind IN ('call', 'queued')),
    ref INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (kind, ref)
);

-- ... the arguments of what goes on later, perhaps in another process, ...
CREATE TABLE arguments (
    kind TEXT NOT NULL CHECK (kind IN ('approval', 'queued')),
    ref TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (kind, ref)
);

-- ... and large contents, in parts that can be read one by one.
CREATE TABLE blobs (
    handle TEXT PRIMARY KEY,
    size INTEGER NOT NULL,
    part_size INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    tenant TEXT,
    tool TEXT NOT NULL,
    kept_at REAL NOT NULL
);
CREATE INDEX blobs_by_age ON blobs (kept_at);
CREATE TABLE blob_parts (
    handle TEXT NOT NULL,
    number INTEGER NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (handle, number)
);
