-- Batches that can be gone on with by name. Their calls, where they are kept, are in the table arguments.
CREATE TABLE batches (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key BLOB NOT NULL UNIQUE,              -- keyed digest of run and name
    run_id TEXT NOT NULL,
    named TEXT NOT NULL CHECK (named IN ('batch', 'response')),  -- by its caller, or by the provider
    name TEXT NOT NULL,
    tenant TEXT,
    plan INTEGER NOT NULL,
    size INTEGER NOT NULL,
    digest BLOB,                           -- keyed digest of the calls
    owner INTEGER NOT NULL REFERENCES owners (id),
    token BLOB UNIQUE,                     -- the attempt that is at work; none: it has ended
    attempts INTEGER NOT NULL DEFAULT 1,
    begun_at REAL NOT NULL,
    ended_at REAL,
    ok INTEGER
);
CREATE INDEX batches_by_run ON batches (run_id, id);
ALTER TABLE calls ADD COLUMN of_batch BLOB;  -- the key of the batch that it was begun in, where that is kept
CREATE INDEX calls_by_batch ON calls (of_batch) WHERE of_batch IS NOT NULL;

-- How long calls of each tool take: what the order of a plan goes by.
CREATE TABLE means (
    tool TEXT PRIMARY KEY,
    weight REAL NOT NULL,
    seconds REAL NOT NULL,
    told_at REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX means_by_age ON means (told_at);

-- The arguments of batches stand where those of other calls do.
CREATE TABLE arguments_of_all (
    kind TEXT NOT NULL CHECK (kind IN ('approval', 'queued', 'batch')),
    ref TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (kind, ref)
);
INSERT INTO arguments_of_all (kind, ref, body) SELECT kind, ref, body FROM arguments;
DROP TABLE arguments;
ALTER TABLE arguments_of_all RENAME TO arguments;
