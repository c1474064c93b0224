-- A person's decision goes with a deferred call, and is used for that call and no other.
ALTER TABLE deferred ADD COLUMN approval TEXT;                       -- the id of its approval
CREATE INDEX deferred_by_approval ON deferred (approval) WHERE approval IS NOT NULL;
ALTER TABLE approvals ADD COLUMN handle TEXT;                        -- of the deferred call that it is for
ALTER TABLE approvals ADD COLUMN edited INTEGER NOT NULL DEFAULT 0;  -- its arguments are the person's, not the model's
ALTER TABLE approvals ADD COLUMN claimed_for BLOB;                   -- the key of the call that has used it
