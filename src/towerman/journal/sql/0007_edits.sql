-- A decision that comes again is known again, also when the arguments that it brought are not stored any more.
ALTER TABLE approvals ADD COLUMN edit BLOB;  -- a salted digest of a person's arguments, as a value is stored
