"""What every format needs to write: ids that pair, names and arguments that are taken back, plain copies.

Theory. A provider refuses a whole conversation, at this request and at every later one, when one call and its result
do not pair, when a name breaks its pattern or when arguments are no JSON object. Models do emit all of that. So what
goes back is made acceptable: ids that are missing or repeated get fallbacks, on the assistant message and on the
results alike; a name is cut to the provider's alphabet; arguments that are no JSON object are wrapped in one, whole,
so that the model still sees what it wrote.

House rules. The same batch gives the same bytes. Everything returned is new: a host may change it without changing
the response that it came from. Only what could not be taken back is altered.

Not here: which keys a provider wants (openai, anthropic, native).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2s
from typing import Final, cast

from towerman.adapters.reading import fields_of
from towerman.bounds import EMPTY, EncodingError, encode
from towerman.calls import Batch, Result
from towerman.errors import InputError

INVALID: Final = "INVALID_JSON"
"""Key under which text that is no JSON object is sent back, as Anthropic's documentation of streamed input has it."""

ANY_ID: Final = re.compile(r"[^\ud800-\udfff]{1,4096}", re.DOTALL)
"""An id that can be sent at all."""

DEEPEST: Final = 200
"""Levels of nesting that are copied."""

LARGEST: Final = 14_000
"""Bits of a whole number beyond which Python itself may refuse to write its digits."""

LONGEST_VALUE: Final = 1_000_000
"""Bytes of a value that is no plain data: as many as a call's arguments may have."""

_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9_-]")


def export_ids(batch: Batch, allowed: re.Pattern[str] = ANY_ID) -> list[str]:
    """One id per call, all different: the call's own where it is allowed and not yet taken, else a fallback.

    The first of a repeated id keeps it. A fallback is `call_<index>`, with a digest of the response's id in the
    middle where there is one, because some providers want ids to differ over the whole conversation.
    """
    ids = [call.id for call in batch.calls]
    fits = allowed.fullmatch
    if len(set(ids)) == len(ids) and all(map(fits, ids)):
        return ids
    stem = "call"
    if batch.response_id:
        stem += "_" + blake2s(batch.response_id.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()
    given = set(ids)
    kept: set[str] = set()
    for index, own in enumerate(ids):
        if own not in kept and fits(own):
            kept.add(own)
            continue
        chosen, again = f"{stem}_{index}", 1
        while chosen in given:
            again += 1
            chosen = f"{stem}_{index}_{again}"
        ids[index] = chosen
    return ids


def check_pairing(batch: Batch, results: Sequence[Result]) -> None:
    """Raise InputError unless there is one result for each call, in emitted order."""
    if len(results) != len(batch.calls):
        raise InputError(
            f"results: {len(results)} for {len(batch.calls)} calls; hand in one for each, in emitted order"
        )
    for place, result in enumerate(results):
        if result.index != place:
            raise InputError(f"results[{place}].index: {result.index}; hand in one for each call, in emitted order")


def shown(result: Result) -> str:
    """The content of a result, or the marker for an empty one."""
    content = result.content
    return EMPTY if not content or content.isspace() else clean_text(content)


def clean_name(name: str, pattern: re.Pattern[str], longest: int) -> str:
    """A tool's name as the provider takes it back: as it is where it can be, else in the provider's alphabet."""
    if pattern.fullmatch(name):
        return name
    return _NOT_IN_A_NAME.sub("_", name[:longest]) or "unnamed"


def clean_text(text: str) -> str:
    """Text that can be written as UTF-8: halves of surrogate pairs are joined where they fit, else replaced."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def as_object(arguments: Mapping[str, object] | str) -> dict[str, object]:
    """Arguments as a JSON object; text that is none is wrapped in one."""
    if not isinstance(arguments, str):
        return plain_object(arguments)
    found = _read_object(arguments)
    return {INVALID: clean_text(arguments)} if found is None else plain_object(found)


def as_text(arguments: Mapping[str, object] | str, *, valid: bool) -> str:
    """Arguments as JSON text: the model's own where it is an object, else that text wrapped in an object.

    Args:
        arguments: as the call has them.
        valid: text that is not empty is known to hold an object, since the handler was started with it.
    """
    if not isinstance(arguments, str):
        return json.dumps(plain_object(arguments), ensure_ascii=False)
    if not arguments or arguments.isspace():
        return "{}"
    text = clean_text(arguments)
    return text if valid or _read_object(text) is not None else json.dumps({INVALID: text}, ensure_ascii=False)


def _read_object(text: str) -> dict[str, object] | None:
    if not text or text.isspace():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def spoken(message: Mapping[str, object] | None) -> str:
    """The text that an assistant message holds beside its calls, for another format's message."""
    content = message.get("content") if message is not None else None
    if isinstance(content, str):
        return clean_text(content)
    if not isinstance(content, list | tuple):
        return ""
    texts = [block.get("text") for block in content if isinstance(block, Mapping) and block.get("type") == "text"]
    return clean_text("".join(text for text in texts if isinstance(text, str)))


def plain(value: object, above: tuple[int, ...] = ()) -> object:
    """A copy in plain JSON data; what JSON has no form for is written as in a result, or is the name of its type.

    Args:
        value: anything.
        above: identities of the containers that the value stands in, so that a circle ends.
    """
    kind = type(value)
    if kind is str:
        return clean_text(cast(str, value))
    if value is None or kind is bool:
        return value
    if kind is int and cast(int, value).bit_length() <= LARGEST:
        return value
    if kind is float and math.isfinite(cast(float, value)):
        return value
    if len(above) >= DEEPEST or id(value) in above:
        return f"<{kind.__name__}>"
    fields = fields_of(value)
    if fields is not None:
        return plain_object(fields, (*above, id(value)))
    if isinstance(value, list | tuple):
        above = (*above, id(value))
        return [plain(item, above) for item in value]
    try:
        # Inside a list, so that what comes back is JSON for text and bytes too.
        written = json.loads(encode([value], LONGEST_VALUE).text)
    except EncodingError:
        return f"<{kind.__name__}>"
    return written[0] if isinstance(written, list) else written


def plain_object(fields: Mapping[str, object], above: tuple[int, ...] = ()) -> dict[str, object]:
    """A copy of a mapping in plain JSON data; keys become text."""
    above = above or (id(fields),)
    return {
        clean_text(key) if type(key) is str else str(plain(key, above)): plain(inner, above)
        for key, inner in fields.items()
    }


def plain_fields(fields: Mapping[str, object], without: frozenset[str]) -> dict[str, object]:
    """A plain copy of the fields that are set (not None) and not left out."""
    return {
        clean_text(str(key)): plain(value) for key, value in fields.items() if value is not None and key not in without
    }
