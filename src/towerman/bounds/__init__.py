"""A handler's value becomes text for the model, never longer than its limit and never broken.

Theory. Text (a str, bytes that are UTF-8) passes as itself. Everything else becomes compact JSON. A value is read
once, into a tree whose parts know their size, so that the size of the whole is known without writing the whole down.
Then at most `limit` bytes are written. What is larger is cut.

A result is never empty: None, blank text and no bytes become EMPTY; `[]` and `{}` say by themselves that they are.

Five files, each standing on those before it: `values` tells what a value is by its type; `jsontext` writes, measures
and reads JSON; `reading` makes the tree; `cutting` fits it into its room; `encoding` is the way in.

House rules. `encode` raises nothing but EncodingError. Its message names types and positions, never a value: keys of
the handler's own dicts are values too, so a place in a dict is told as `<key 2>`. Equal input gives equal bytes: sets
are ordered by their encoded text. A handler's objects are told apart by their type, never by what they claim to be.

Not here: pages of what does not fit (pages), keeping it (store), content blocks of a protocol, the wording of failures.
"""

from towerman.bounds.cutting import NO_HINT, Hint, fit_batch, share_room
from towerman.bounds.encoding import EMPTY, MIN_BYTES, Encoded, Encoder, EncodingError, Keep, Large, encode, recut
from towerman.bounds.reading import MAX_DEPTH

__all__ = [
    "EMPTY",
    "MAX_DEPTH",
    "MIN_BYTES",
    "NO_HINT",
    "Encoded",
    "Encoder",
    "EncodingError",
    "Hint",
    "Keep",
    "Large",
    "encode",
    "fit_batch",
    "recut",
    "share_room",
]
