-- The bounds of its run go with a deferred call.
ALTER TABLE deferred ADD COLUMN deadline REAL;    -- Unix time of the end of its run, or none
ALTER TABLE deferred ADD COLUMN permission TEXT;  -- JSON: the tool names that the run allows, and those that it denies
