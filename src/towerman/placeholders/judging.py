"""Is a text a placeholder, where it stands and beside these calls?

Theory. Nothing is one by itself. The stricter the role of an argument, the less a text has to say: an identifier may
not be any gap, prose may not be one as a whole, a query only where it speaks of the result of a call, code only where
it does so in plain words, a template never. What other calls of the batch are called, give and are known by counts
where the text names it, and nowhere else: so calls that it does not name change nothing.

House rules. Pure, and linear in the text. A value that the schema itself names is none.

Not here: which values are looked at (guard).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from towerman.calls import Call
from towerman.placeholders import patterns
from towerman.placeholders.reading import (
    MOST_READ,
    Gap,
    called,
    follows_arrow,
    gaps_in,
    head_of,
    holds_result,
    is_computed,
    is_identifier,
    is_nothing,
    is_numbered_path,
    is_reference_object,
    is_said,
    is_tag,
    is_variable,
    names_done,
    numbered_dollars,
    numbered_step,
    only_of_results,
    points_back,
    reaches_into_result,
    reaches_into_step,
    speaks_of_result,
    whole_gap,
    without_code,
)
from towerman.placeholders.roles import STRICT, Role, Spot, Words
from towerman.placeholders.words import (
    AMOUNTS,
    AWAITED,
    BEFORE,
    BLANK_PHRASES,
    BLANKS,
    CALL_IDS,
    DATES,
    DONE,
    ENDINGS,
    ENTITIES,
    FILLERS,
    GIVEN,
    KINDS,
    LOOKUPS,
    MISSING,
    MOST,
    NEWEST,
    NOUNS,
    NUMBERED,
    OPEN,
    PLACES,
    POINTERS,
    PROGRAMMING,
    RESULTS,
    STEPS,
    TAGGED,
    TIMES,
    TYPES,
    VERBS,
    words_of,
)


class Others:
    """The calls of a batch, as they can be named in the arguments of one of them.

    Args:
        calls: all of them, in emitted order.
    """

    __slots__ = ("_ids", "_names", "_products", "_tools", "calls")

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self._tools: frozenset[str] | None = None
        self._names: dict[str, list[int]] | None = None
        self._ids: dict[str, list[int]] = {}
        self._products: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def tools(self) -> frozenset[str]:
        """The names of their tools."""
        if self._tools is None:
            self._tools = frozenset([_text(call.tool) for call in self.calls])
        return self._tools

    def _read(self) -> dict[str, list[int]]:
        """Made at the first question: most batches hold nothing that asks one."""
        names = self._names
        if names is None:
            names = {}
            for index, call in enumerate(self.calls):
                words = words_of(_text(call.tool))
                if words:
                    _note(names, " ".join(words), index)
                if len(words) > 1:
                    _note(self._products, " ".join(words[1:]), index)
                own = _text(call.id)
                if len(own) > 1:
                    _note(self._ids, own, index)
            self._names = names
        return names

    def tool(self, words: Sequence[str], index: int) -> int | None:
        """Another call whose tool has a name of just these words."""
        return _other(self._read().get(" ".join(words)), index)

    def id(self, text: str, index: int) -> int | None:
        """Another call with this id."""
        self._read()
        return _other(self._ids.get(text), index)

    def named_in(self, words: Sequence[str], index: int, most: int = 5) -> int | None:
        """Another call whose tool is named somewhere in these words, in two words or more."""
        names = self._read()
        for start in range(len(words)):
            for stop in range(start + 2, min(start + most, len(words)) + 1):
                found = _other(names.get(" ".join(words[start:stop])), index)
                if found is not None:
                    return found
        return None

    def giver(self, words: Sequence[str], index: int) -> int | None:
        """Another call that makes what these words name."""
        self._read()
        return _other(self._products.get(" ".join(words)), index)

    def numbered(self, number: int, index: int) -> int | None:
        """Another call with this number, counted from 0 or from 1."""
        for found in (number - 1, number):
            if 0 <= found < len(self.calls) and found != index:
                return found
        return None


def _text(given: object) -> str:
    """A name as it came; what is no text names nothing."""
    return given if isinstance(given, str) else ""


_KEPT: Final = 2  # of calls that are called alike: one of them is another one than the call itself


def _note(table: dict[str, list[int]], key: str, index: int) -> None:
    found = table.setdefault(key, [])
    if len(found) < _KEPT:
        found.append(index)


def _other(found: list[int] | None, index: int) -> int | None:
    return next((one for one in found or () if one != index), None)


SOMEWHERE: Final = -1
"""A placeholder that names no call of the batch."""


def judge(text: str, spot: Spot, others: Others, index: int) -> int | None:
    """Is this text a placeholder?

    Args:
        text: what stands there.
        spot: where.
        others: the calls of the batch.
        index: which of them it is an argument of.

    Returns:
        None: it is a value. Else the index of the call that it names, or `SOMEWHERE`.
    """
    if text in spot.known:
        return None
    if spot.role == "form":
        return None
    whole = _stripped(text)
    if not whole:
        return None
    open_ = _OPENERS.isdisjoint(whole) is False
    gap = whole_gap(whole) if open_ else None
    if gap is not None and not (spot.tool.maths and gap.style == "mark"):
        if _whole_gap_is(gap, spot, others, index):
            return _source(gap.words, gap.inner, others, index)
        if spot.role in STRICT:
            return None
    elif spot.role == "code" or (spot.role == "query" and spot.tool.codes):
        if len(whole) <= MOST and _is_no_code(whole, spot, others, index):
            return SOMEWHERE
    elif len(whole) <= MOST:
        named = _whole_words(whole, spot, others, index)
        if named is not None:
            return named
    return _parts(text, spot, others, index) if open_ else None


_OPENERS: Final = frozenset("$<{[%#@~|=*_/\xab\u2039")
"""Without one of these there is no gap in a text."""


def _stripped(text: str) -> str:
    """Without what is around a text as a whole: blanks, quotes, parentheses."""
    if len(text) > 2 * MOST:
        return text
    text = text.strip().strip("\"'`").strip()
    if text[:1] == "(" and text[-1:] == ")" and "(" not in text[1:]:
        text = text[1:-1].strip()
    return text


def _source(words: Sequence[str], inner: str, others: Others, index: int) -> int:
    """The call that a gap names."""
    head, tail = head_of(inner.strip())
    found = others.id(inner.strip(), index)
    if found is None and tail:
        found = others.id(head.strip(), index)
    if found is None:
        found = others.tool(words_of(head), index)
    if found is None:
        found = others.named_in(words, index)
    return SOMEWHERE if found is None else found


def _points(gap: Gap, others: Others, index: int) -> bool:
    """Does a gap speak of the result of a call, or name one of the batch?"""
    words = gap.words
    if gap.style == "mark" or (gap.style == "name" and words[0] in BEFORE):
        return True
    if speaks_of_result(words) or reaches_into_step(gap.inner.strip()) or numbered_step(gap.inner.strip()):
        return True
    if len(words) == 1 and (words[0] in RESULTS or words[0] in BEFORE or words[0] == "generated"):
        return True
    if gap.style == "dollar" and words[0] in STEPS and len(words) > 2:
        return True
    return _source(words, gap.inner, others, index) != SOMEWHERE


def _plain_words(gap: Gap) -> bool:
    """A gap that cannot be code: words with blanks between them that speak of the result of a call."""
    return gap.prose and gap.style in ("angle", "mustache", "square", "brace") and _spoken(gap.words)


def _spoken(words: Sequence[str]) -> bool:
    if speaks_of_result(words, plainly=True):
        return True
    joined = {"of", "from", "by"}.intersection(words)
    stepped = (STEPS - {"e"}).intersection(words) and (
        RESULTS.intersection(words) or (BEFORE | NUMBERED).intersection(words) or any(word.isdigit() for word in words)
    )
    return bool(joined and stepped)


def _whole_gap_is(gap: Gap, spot: Spot, others: Others, index: int) -> bool:
    """Is a text a placeholder that is one gap and nothing else?"""
    role, tool = spot.role, spot.tool
    if gap.style == "mark":
        return role not in ("code", "form") and _COLORS.isdisjoint(spot.own)
    if gap.style == "doubled":
        return role in STRICT
    if role == "code" or (role == "query" and tool.codes):
        if tool.runs and not is_tag(gap) and (gap.style == "mustache" or (gap.style == "angle" and len(gap.words) > 1)):
            return True  # nothing that could be run
        return _plain_words(gap)
    if role == "place" and is_variable(gap):
        return False
    if role in STRICT:
        return True
    if gap.style == "name":
        if {"symbol", "ticker", "stock", "cashtag"} & set(spot.own):
            return False
        return role not in ("text", "query") or _points(gap, others, index) or gap.inner.islower()
    if role == "plain":
        return gap.style != "square" or _is_opening(gap) or _points(gap, others, index)
    if role == "label":
        return gap.style in ("mustache", "dollar") or len(gap.words) > 1
    if _points(gap, others, index) and not is_tag(gap):
        return True
    if role == "query":
        return not is_tag(gap) and (gap.style != "square" or _is_opening(gap))
    if tool.files or is_tag(gap):
        return False
    return gap.style != "square" or _is_opening(gap)


_COLORS: Final = frozenset({"color", "colour", "colors", "colours", "hex"})


def _is_opening(gap: Gap) -> bool:
    """What a letter leaves open, in square brackets: `[Customer Name]`."""
    words = gap.words
    if len(words) > 6:
        return False
    if words[0] in ("insert", "enter", "your", "add"):
        return True
    if "_" in gap.inner and is_identifier(gap.inner):
        return True
    if 1 < len(words) <= 4 and words[-1] in NOUNS and words[0] not in TAGGED:
        return True
    known = sum(word in NOUNS for word in words)
    return known == len(words) and (len(words) > 1 or not gap.inner.isupper() or gap.inner in ("NAME", "DATE"))


def _whole_words(whole: str, spot: Spot, others: Others, index: int) -> int | None:
    """Is a text without marks a placeholder as a whole, by its words?"""
    role = spot.role
    words = words_of(whole)
    if role in STRICT and (set(whole) <= _DOTS or (whole.lower().count("x") > 2 and set(whole.lower()) <= _CROSSES)):
        return SOMEWHERE if len(whole) > 2 or whole[0] == "?" else None
    if role in ("exact", "plain") and patterns.CROSSED.fullmatch(whole) is not None:
        return SOMEWHERE
    if _is_sign(whole, role):
        return SOMEWHERE
    if not words:
        return None
    if len(words) > 14:
        return None
    reference = _reference(whole, words, spot, others, index)
    if reference is not None:
        return reference
    named = is_identifier(whole)
    if role == "label":
        return None
    if role in STRICT:
        return SOMEWHERE if _stands_in(whole, words, spot) else None
    if role == "plain":
        if _is_own_name(whole, words, spot) or _is_fill(words, spot, named, whole.isupper()):
            return SOMEWHERE
        if words == ["string"] and whole == "string":
            return SOMEWHERE
        if named and whole.isupper() and len(words) > 2 and not TIMES.isdisjoint(words) and not OPEN.isdisjoint(words):
            return SOMEWHERE
        if words[0] == "use" and not RESULTS.isdisjoint(words):
            return SOMEWHERE
        if named and len(words) > 1 and words[0] in NEWEST and words[-1] in KINDS:
            return SOMEWHERE
        return SOMEWHERE if names_done(words) and whole.lower() == whole else None
    if role == "query":
        return None
    return SOMEWHERE if names_done(words) and _TITLES.isdisjoint(spot.own) else None


def _is_sign(whole: str, role: Role) -> bool:
    """Is a text a sign that stands for a value, whatever its words are?"""
    first = whole[0]
    if first in _POINTERS:
        if role not in ("code", "form", "label") and points_back(whole):
            return True
        if role in STRICT and whole in ("%s", "%d", "%i", "%f"):
            return True
    if role not in STRICT and role != "plain":
        return False
    if first in "<{[":
        return is_nothing(whole) or is_reference_object(whole)
    return (first == "$" and is_computed(whole)) or ("_" in whole and follows_arrow(whole))


_POINTERS: Final = frozenset("@&!~^%")
_DOTS: Final = frozenset("?.…")
_CROSSES: Final = frozenset("x-_. ")
_TITLES: Final = frozenset({"title", "subject", "caption", "prompt", "headline", "label"})


def _reference(whole: str, words: list[str], spot: Spot, others: Others, index: int) -> int | None:
    """Does a text name a call, or what it gives, outright?"""
    role = spot.role
    named = is_identifier(whole)
    if role != "label":
        number = numbered_step(whole)
        if number is not None and number[0] not in spot.own and number[0] not in spot.tool.words and " " not in whole:
            found = others.numbered(number[1], index)
            if found is not None or (role in STRICT and number[0] in ("call", "step")):
                return SOMEWHERE if found is None else found
        if words[0] in CALL_IDS:
            found = others.id(whole, index)
            if found is not None:
                return found
        head, tail = head_of(whole)
        if tail and role != "query":
            found = others.id(head, index)
            if found is None:
                found = others.tool(words_of(head), index)
            if found is not None and patterns.REACHES.fullmatch(tail) and not _is_file(tail):
                return found
        if reaches_into_step(whole):
            return _source(words, whole, others, index)
        if role not in ("query", "text") and _is_expression(whole, words, spot, others, index):
            return _source(words, whole, others, index)
        if whole[:1] == "$":
            return _numbered_dollar(whole, spot, others, index)
    if role == "label":
        return None
    if named and len(words) > 1:
        if speaks_of_result(words) or _from_lookup(words):
            return _source(words, whole, others, index)
        found = others.named_in(words, index)
        if found is not None and (RESULTS | {"from"}).intersection(words):
            return found
        for length in range(1, len(words)):
            if all(word in _GIVES for word in words[length:]):
                found = others.tool(words[:length], index)
                if found is not None:
                    return found
    if (named or " " in whole) and only_of_results(words) and (role != "text" or _TITLES.isdisjoint(spot.own)):
        return _source(words, whole, others, index)
    if role == "query":
        return None
    if role == "text":  # prose speaks of results by right: only what says nothing else is no prose
        return _source(words, whole, others, index) if _says_nothing_else(whole, words, spot) else None
    if " " in whole and "/" not in whole and (role in STRICT or not is_said(words)):
        found = others.named_in(words, index)
        if found is not None and {"from", "of", "by", "result", "output", "returned"}.intersection(words):
            return found
        if speaks_of_result(words, plainly=role not in STRICT or spot.dated) or (_spoken(words) and not spot.dated):
            return _source(words, whole, others, index)
    return _product(words, spot, others, index)


def _is_no_code(whole: str, spot: Spot, others: Others, index: int) -> bool:
    """Code to be run, or a sum to be worked out, that is a reference: `output_of_step_1`, `$1 / $2`."""
    if spot.tool.maths:
        numbers = set(numbered_dollars(whole))
        if numbers and (max(numbers) <= index or (len(numbers) > 1 and numbers == set(range(1, len(numbers) + 1)))):
            return True
        if any(gap.style == "mark" for gap in gaps_in(whole)):
            return True
    words = words_of(whole)
    return bool(
        spot.tool.runs
        and is_identifier(whole)
        and {"of", "from", "step"}.intersection(words)
        and speaks_of_result(words)
    )


def _is_file(tail: str) -> bool:
    """`.txt`: what comes behind the name of a tool is the ending of a file."""
    return tail[:1] == "." and tail[1:] in ENDINGS


_GIVES: Final = RESULTS | {"id", "data", "value"}


def _says_nothing_else(whole: str, words: Sequence[str], spot: Spot) -> bool:
    """`output of step 2`, `The content returned by the first call`, in place of the content."""
    if len(words) > 9 or is_said(words) or not all(char.isalnum() or char in " _'-" for char in whole):
        return False
    if words[0] in ("insert", "enter", "put", "your") and words[-1] == "here":
        return True
    first = words[1] if words[0] in ("the", "a") and len(words) > 1 else words[0]
    if first in ("output", "result", "response") and len(words) <= 6 and speaks_of_result(words):
        return spot.own[-1:] != ("title",) or is_identifier(whole)
    return first in GIVEN | RESULTS | _REPORTS and _spoken(words) and _TITLES.isdisjoint(spot.own)


_REPORTS: Final = frozenset(
    {"report", "message", "details", "info", "information", "findings", "email", "body", "code"}
)


def _is_expression(whole: str, words: Sequence[str], spot: Spot, others: Others, index: int) -> bool:
    """`results[0].city`, `get_user(id=42).city`, `$1.city`: what a program would compute."""
    if is_numbered_path(whole) or (reaches_into_result(whole) and "@" not in whole):
        return True
    if holds_result(whole) and (spot.role != "place" or words[0] in STEPS or words[-1] not in RESULTS):
        return True
    if spot.role in ("exact", "number") and len(words) == 2 and words[0] in RESULTS and words[1].isdigit():
        return is_identifier(whole)
    name = called(whole)
    if name is None:
        return False
    parts = words_of(name)
    return others.tool(parts, index) is not None or (len(parts) > 1 and parts[0] in VERBS)


def _numbered_dollar(whole: str, spot: Spot, others: Others, index: int) -> int | None:
    """`$1`: the result of the first call, or a price; `$.a.b`: a path into one, or a path by right."""
    if whole.startswith("$.") and len(whole) > 2:
        return SOMEWHERE if spot.role in ("exact", "number", "place", "plain") and not _paths(spot) else None
    digits = whole[1:]
    if not digits.isdecimal() or len(digits) > 2:
        return None
    if spot.money or spot.role == "number" or (len(digits) > 1 and spot.role in ("text", "query")):
        return None
    found = others.numbered(int(digits), index)
    return SOMEWHERE if found is None else found


def _paths(spot: Spot) -> bool:
    return bool({"json", "jsonpath", "jq"} & spot.tool.words)


def _from_lookup(words: Sequence[str]) -> bool:
    """`id_from_search`, `from_step_1`."""
    if "from" not in words:
        return False
    rest = words[words.index("from") + 1 :]
    return bool(rest) and any(word in LOOKUPS or word in STEPS or word in BEFORE or word in RESULTS for word in rest)


def _product(words: list[str], spot: Spot, others: Others, index: int) -> int | None:
    """`created_invoice`, where another call makes an invoice."""
    if spot.role not in ("exact", "place", "plain", "number") or len(words) > 6:
        return None
    if not (DONE | {"new", "resulting"}).intersection(words):
        return None
    kept = [word for word in words if word not in DONE and word not in FILLERS and word not in KINDS]
    return others.giver(kept, index) if kept else None


def _is_own_name(whole: str, words: list[str], spot: Spot) -> bool:
    """The name of the argument in place of its value."""
    if not spot.own or tuple(words) != spot.own:
        return False
    if len(words) > 1:
        return "_" in whole  # names of variables are written in other ways where code is handed on
    return spot.own[-1] in ENTITIES


def _is_fill(words: Sequence[str], spot: Spot, named: bool, upper: bool) -> bool:
    """`YOUR_ORDER_ID`, `insert_token_here`, `REPLACE_ME`, `placeholder`."""
    if len(words) == 1:
        return words[0] in ("placeholder", "changeme")
    if words[0] == "your" and not _CREDENTIALS.isdisjoint(spot.own[-1:]):
        return False  # what a user, or a host that puts it in, calls the value
    if words[-1] == "here" and (named or words[0] in ("your", "insert", "enter", "put")):
        return True
    if words[0] == "your" and named and spot.role in STRICT:
        return True
    if upper and words[0] in ("insert", "enter", "put"):
        return True
    return named and tuple(words[:2]) in (("replace", "with"), ("replace", "me"), ("change", "me"), ("fill", "me"))


_CREDENTIALS: Final = frozenset({"key", "token", "secret", "password", "passphrase", "apikey"})


def _stands_in(whole: str, words: list[str], spot: Spot) -> bool:
    """A text where only the real value is of use: does it say that it is none?"""
    role, named = spot.role, is_identifier(whole)
    own = set(spot.own)
    if len(words) == 1:
        word = words[0]
        if word in BLANKS:
            return True
        if role == "number":
            return word in TYPES or word in own or word in MISSING or word in AWAITED
        if word in MISSING or word in AWAITED:
            return spot.identifies
        return (word in TYPES and spot.identifies) or word in KINDS or (spot.own == (word,) and word in ENTITIES)
    if any(tuple(words[: len(phrase)]) == phrase for phrase in BLANK_PHRASES):
        return True
    if words[0] in AWAITED and (" " in whole or (named and spot.identifies)):
        return True
    if "placeholder" in words and named and (role != "place" or whole.isupper()):
        return True
    if not TIMES.isdisjoint(words) and not _NOT_YET.isdisjoint(words) and not spot.dated:
        return True
    if spot.role == "exact" and named and not spot.dated and not OPEN.isdisjoint(words) and not _has_digit(whole):
        return True
    if spot.identifies and " " in whole and not POINTERS.isdisjoint(words):
        return True
    if tuple(words) == spot.own or _is_fill(words, spot, named or "-" in whole, whole.isupper()):
        return True
    if whole.lower() in ("n/a",):
        return spot.identifies
    if _has_digit(whole) or "@" in whole:
        return False
    if role == "place":
        return _no_location(whole, words)
    if not _SPEAKING.issuperset(char for char in whole if not char.isalnum()):
        return False  # a key, a name with a dot
    if words[0] == "my":  # what people call their own things
        return False
    if role == "number":
        if "." in whole and not whole.islower():
            return False  # a constant
        return bool((AMOUNTS | own | RESULTS | BEFORE | DONE).intersection(words)) and len(words) <= 10
    if spot.identifies and own & KINDS and KINDS.intersection(words):
        return True
    kinds = DATES if spot.dated else own | {"email", "address", "id", "uuid", "phone"}
    joined = {"from", "of", "returned", "by", "the"}.intersection(words)
    if " " in whole and (joined or "'s " in whole or "\u2019s " in whole) and kinds.intersection(words):
        return True
    return names_done(words) or _uuid_in_words(words, spot)


_SPEAKING: Final = frozenset(" _-'\u2019.,")


_NOT_YET: Final = (
    MISSING
    | AWAITED
    | OPEN
    | RESULTS
    | BEFORE
    | {"search", "known", "available", "call", "step", "complete", "completes"}
)


def _has_digit(text: str) -> bool:
    return any(char.isdigit() for char in text)


def _uuid_in_words(words: Sequence[str], spot: Spot) -> bool:
    return bool(KINDS.intersection(words)) and spot.identifies


def _no_location(whole: str, words: list[str]) -> bool:
    """A file or URL that is neither, but speaks of one."""
    if any(char in whole for char in "/\\.:~*"):
        return False
    if names_done(words):
        return True
    about = PLACES.intersection(words)
    joined = (RESULTS | BEFORE | DONE | {"from", "of"}).intersection(words)
    said = " " in whole or not {"of", "from"}.isdisjoint(words)
    return bool(said and joined and (about or RESULTS.intersection(words) or BEFORE.intersection(words)))


def _parts(text: str, spot: Spot, others: Others, index: int) -> int | None:
    """Is there a gap in a text that is more than that, which makes it useless where it stands?"""
    role = spot.role
    if role == "text":
        text = without_code(text)
    if role in ("place", "plain") and ":" in text:
        found = patterns.SEGMENT.search(text[:MOST])
        if found is not None and role == "place" and text.lstrip().startswith(("/", "http")):
            return SOMEWHERE
        if role == "place" and "%s" in text and "://" in text:
            return SOMEWHERE
    for gap in gaps_in(text):
        if _part_is(gap, text, spot, others, index):
            return _source(gap.words, gap.inner, others, index)
    return None


def _part_is(gap: Gap, text: str, spot: Spot, others: Others, index: int) -> bool:
    role, tool, style = spot.role, spot.tool, gap.style
    if role == "code" or (role == "query" and tool.codes):
        return _plain_words(gap) or (tool.runs and _cannot_run(gap, tool, text))
    if style == "mark":
        if role == "text" and patterns.NUMBERED_SIGN.search(text, 0, MOST_READ) is not None:
            return False  # a text that speaks of numbers by this sign
        if role in ("text", "query") and text.lstrip()[:1] == "#" and is_said(words_of(text[:80])[:6]):
            return False  # the sign is a name of which something is said: `#E1 is the room`
        before = words_of(text[max(0, gap.start - 20) : gap.start])
        return role != "label" and _COLORS.isdisjoint(spot.own) and _NUMBERS_OF.isdisjoint(before[-1:])
    if style == "name":
        return _is_label_of_plan(gap, text) or (
            role in ("exact", "place") and gap.inner.islower() and not is_variable(gap) and len(gap.inner) > 1
        )
    if style == "percent":
        return role == "exact" and not is_variable(gap) and "_" in gap.inner
    if role == "place":
        if style == "square":
            return _points(gap, others, index) or (gap.prose and _is_opening(gap))
        return not is_variable(gap) and not (style == "angle" and is_tag(gap) and ">" in text[: gap.start])
    if role in ("exact", "number", "plain", "label"):
        if not _CREDENTIALS.isdisjoint(spot.own[-1:]):
            return False
        if style == "square":
            return role != "label" and (
                _points(gap, others, index)
                or (gap.prose and _is_opening(gap))
                or (role == "exact" and NOUNS.issuperset(gap.words))
            )
        return len(gap.inner.strip()) > 1 and not is_tag(gap) and (style != "brace" or len(gap.inner) > 2)
    if _plain_words(gap):
        return True
    if role == "query":
        return style != "square" and _left_open(gap, text) and PROGRAMMING.isdisjoint(words_of(text))
    return (tool.sends or (tool.makes and style != "brace")) and not tool.files and _left_open(gap, text)


_NUMBERS_OF: Final = frozenset(
    {"error", "code", "exception", "room", "gate", "seat", "item", "issue", "fault", "type", "model", "no", "fehler"}
)


def _cannot_run(gap: Gap, tool: Words, text: str) -> bool:
    """A gap in code that runs nowhere: `WHERE id = <order_id>`."""
    name = gap.inner.strip()
    if not is_identifier(name) or len(gap.words) < 2:
        return False
    if gap.style == "angle":
        return gap.words[-1] in NOUNS | KINDS and "include" not in text[max(0, gap.start - 9) : gap.start]
    return gap.style == "mustache" and "sql" in tool.words


def _is_label_of_plan(gap: Gap, text: str) -> bool:
    """`$var1.city$`, wherever it stands."""
    return text[gap.stop - 1 : gap.stop] == "$" and gap.words[0] in ("var", "step", "result", "output")


def _left_open(gap: Gap, text: str) -> bool:
    """Something left open in a text that is about to go out."""
    if gap.style == "square":
        return _is_opening(gap)
    if gap.style == "brace":
        before = text[gap.start - 1 : gap.start]
        return before != "/" and is_identifier(gap.inner.strip()) and len(gap.inner.strip()) > 1
    if gap.style == "angle":
        return not is_tag(gap) and (len(gap.words) > 1 or gap.words[0] in NOUNS or gap.inner.isupper())
    return gap.style in ("mustache", "dollar")
