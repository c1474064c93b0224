"""What a text says of itself: the gaps in it, and whether its words speak of the result of a call.

Theory. A gap is a stretch in brackets or with a sigil that a model, or a template engine, writes for what comes later:
`<id>`, `{{id}}`, `${id}`, `[Your Name]`, `$PREV`. Words speak of a result when they put together what calls give, what
gives it and which one it was: "output of step 1", `previous_result`, `id_from_search`.

House rules. Linear: patterns are possessive, and what is looked at word by word is the beginning of a text only. What
other notations mean by the same characters (HTML, links, mentions, shells, prices) is no gap.

Not here: whether a gap is wrong where it stands (judging).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from towerman.placeholders import patterns
from towerman.placeholders.words import (
    BEFORE,
    DONE,
    ENDINGS,
    FILLERS,
    GIVEN,
    MOST,
    NUMBERED,
    RESULTS,
    SAID,
    STEPS,
    STRUCTURE,
    TAGS,
    VARIABLES,
    VERBS,
    WHICH,
    words_of,
)

Style = Literal["angle", "mustache", "dollar", "brace", "square", "percent", "name", "mark", "doubled"]
"""`<x>`, `{{x}}`, `${x}`, `{x}`, `[x]`, `%x%` or `__X__`, `$x`, `#E1`, `##x##`."""

MOST_READ: Final = 20_000
"""Characters of a text in which gaps are looked for."""

MOST_GAPS: Final = 200
"""Gaps of one text that are looked at."""


class Gap(NamedTuple):
    """A gap in a text.

    Args:
        style: how it is written.
        inner: what stands between its marks.
        words: the words of that.
        start: where it begins.
        stop: where it ends.
    """

    style: Style
    inner: str
    words: tuple[str, ...]
    start: int
    stop: int

    @property
    def prose(self) -> bool:
        """Two words or more with blanks between them."""
        return " " in self.inner.strip()


_STYLES: Final[dict[str, Style]] = {
    "mustache": "mustache",
    "dollar": "dollar",
    "brace": "brace",
    "angle": "angle",
    "square": "square",
    "named": "percent",
    "percent": "percent",
    "dunder": "percent",
    "name": "name",
    "var": "name",
    "mark": "mark",
}


def without_code(text: str) -> str:
    """The text with what it quotes as code left out."""
    return patterns.QUOTED.sub(" ", text[:MOST_READ]) if "`" in text else text


def gaps_in(text: str) -> Iterator[Gap]:
    """The gaps of a text, as far as they can be meant as such."""
    for count, found in enumerate(patterns.GAP.finditer(text, 0, MOST_READ)):
        if count >= MOST_GAPS:
            return
        group = str(found.lastgroup)
        inner = found[group]
        gap = Gap(_STYLES[group], inner, tuple(words_of(inner)), found.start(), found.end())
        if gap.words and _meant(gap, text):
            yield gap


def _meant(gap: Gap, text: str) -> bool:
    """May these characters be a gap at all?"""
    inner = gap.inner
    if gap.style == "angle":
        if inner[0] == " " or inner[-1] == " ":  # of a text that is more than that: two comparisons, a redirection
            if gap.start or gap.stop != len(text):
                return False
            inner = inner.strip()
        if not patterns.ANGLED.fullmatch(inner) or (gap.start and text[gap.start - 1].isalnum()):
            return False  # an element, a mention, an address; generics
        return not ("=" in inner or (len(gap.words) == 1 and inner.islower() and inner in STRUCTURE))
    if gap.style == "brace":
        return patterns.BRACED.fullmatch(inner) is not None and ": " not in inner
    if gap.style == "square":
        after = text[gap.stop : gap.stop + 1]
        before = text[gap.start - 1 : gap.start]
        return (
            patterns.SQUARED.fullmatch(inner) is not None
            and after not in ("(", "[")
            and not (before and before in "])!\\")
        )
    if gap.style == "mustache":
        return inner.strip()[:1].isalpha() or inner.strip()[:1] in "_$"
    return True


def whole_gap(text: str) -> Gap | None:
    """The gap that a text is, if it is nothing else: perhaps with an index behind, as in `<GENERATED>-0`."""
    if len(text) > MOST:
        return None
    doubled = patterns.DOUBLED.fullmatch(text)
    if doubled is not None:
        return Gap("doubled", doubled["inner"], tuple(words_of(doubled["inner"])), 0, len(text))
    found = next(gaps_in(text), None)
    if found is None or found.start or not patterns.INDEX.fullmatch(text, found.stop):
        return None
    return found


def is_tag(gap: Gap) -> bool:
    """An element of HTML, as it is written."""
    return gap.style == "angle" and len(gap.words) == 1 and gap.inner in TAGS


def is_variable(gap: Gap) -> bool:
    """A variable of the environment that has its place in a path or a script."""
    return gap.inner.lower() in VARIABLES and not gap.inner.islower()


_LOCATION: Final = frozenset("/\\")


def is_nothing(text: str) -> bool:
    """`<...>`, `{0}`: a gap without a word."""
    return patterns.NOTHING.fullmatch(text) is not None


def is_reference_object(text: str) -> bool:
    """`{"$ref": ...}` as text."""
    return patterns.REFERRING.fullmatch(text) is not None


def is_numbered_path(text: str) -> bool:
    """`$1.city`."""
    return patterns.NUMBERED_NAME.fullmatch(text) is not None


def called(text: str) -> str | None:
    """The name of the function, of a text that is a call of one: `get_user(id=42).city`."""
    found = patterns.CALLED.fullmatch(text)
    return None if found is None else found["name"]


def reaches_into_result(text: str) -> bool:
    """`results[0].city`, `response.data.id`; not `results.csv`."""
    head, tail = head_of(text)
    words = words_of(head)
    if len(words) != 1 or words[0] not in RESULTS | BEFORE or tail[:1] not in (".", "["):
        return False
    after = words_of(tail)
    return bool(after) and " " not in tail and "/" not in tail and ("[" in tail or after[-1] not in ENDINGS)


def holds_result(text: str) -> bool:
    """`steps.lookup.output`, `lookup.result.id`: a path with what calls give on its way."""
    if patterns.DOTTED.fullmatch(text) is None:
        return False
    parts = text.replace("[", ".").split(".")
    head = words_of(parts[0])
    if head[:1] and head[0] in VERBS and "_" in parts[0] and parts[-1] not in ENDINGS:
        return True
    return not RESULTS.isdisjoint(parts[1:])


def points_back(text: str) -> bool:
    """`@prev`, `&result`."""
    found = patterns.POINTED.fullmatch(text)
    if found is None:
        return False
    word = found["word"].lower()
    if word in RESULTS or word in BEFORE:
        return True
    path = words_of(found["path"])
    return bool(path) and "_" in word and path[-1] not in ENDINGS


def follows_arrow(text: str) -> bool:
    """`find_user -> id`."""
    found = patterns.ARROW.fullmatch(text)
    return found is not None and words_of(found["name"])[0] in VERBS


def only_of_results(words: Sequence[str]) -> bool:
    """Words that speak of the result of a call, and of nothing else."""
    return speaks_of_result(words) and all(
        word in RESULTS or word in STEPS or word in BEFORE or word in NUMBERED or word in FILLERS or word.isdigit()
        for word in words
    )


def is_computed(text: str) -> bool:
    """`$(get_id)`."""
    return patterns.COMPUTED.fullmatch(text) is not None


def numbered_dollars(text: str) -> list[int]:
    """The numbers of `$1 / $2`."""
    return [int(found["number"]) for found in patterns.MONEYED.finditer(text[:MOST])]


def is_identifier(text: str) -> bool:
    """One name, such as `previous_result`."""
    return patterns.IDENTIFIER.fullmatch(text) is not None


def numbered_step(text: str) -> tuple[str, int] | None:
    """`call_0`, `step 2`: of what, and the number."""
    found = patterns.STEP.fullmatch(text)
    return None if found is None else (found["of"].lower(), int(found["number"]))


def reaches_into_step(text: str) -> bool:
    """`step_1.output`, `call_abc.files[0]`: a path into what a call gave."""
    found = patterns.INTO_STEP.fullmatch(text)
    if found is None:
        return False
    head, tail = _split(text)
    if "_" not in head and "-" not in head and not any(letter.isdigit() for letter in head):
        return False
    # A file in a folder, or with an ending, is none: `step_1/notes.txt`, `call_7.csv`.
    words = words_of(tail)
    return bool(
        RESULTS.intersection(words)
        or head.lower().startswith(("toolu_", "fc_", "chatcmpl-"))
        or (not _LOCATION.intersection(tail) and len(words) > 1)
        or tail.endswith("]")
    )


def _split(text: str) -> tuple[str, str]:
    found = patterns.HEAD.match(text)
    stop = 0 if found is None else found.end()
    return text[:stop], text[stop:]


def head_of(text: str) -> tuple[str, str]:
    """The name that a text begins with, and what reaches into it: `geocode` and `.lat`."""
    return _split(text)


def speaks_of_result(words: Sequence[str], *, plainly: bool = False) -> bool:
    """Do these words speak of the result of a call?

    Args:
        words: in lower case.
        plainly: only words that have no other use beside each other.
    """
    last = len(words) - 1
    for place, word in enumerate(words):
        after = words[place + 1] if place < last else ""
        if word in BEFORE and (after in RESULTS or after in STEPS):
            return True
        if word in NUMBERED and after in _CALLED and not plainly:
            return True
        if word in STEPS and after.isdigit() and not plainly and (RESULTS | _JOINS).intersection(words):
            return True
        if word in RESULTS and after in _JOINS:
            rest = words[place + 2 : place + 6]
            if any(one in STEPS or one in BEFORE for one in rest) or (not plainly and len(words) <= 6):
                return True
    return False


_JOINS: Final = frozenset({"of", "from", "by", "in", "for"})
_CALLED: Final = frozenset({"call", "tool", "step", "result", "output", "response", "action", "task"})


def is_said(words: Sequence[str]) -> bool:
    """Is it a sentence, in which something is said of a result (`The result of step 2 was wrong`), and no name of one
    (`the result of the call that was made first`)?
    """
    return any(word in SAID and before not in WHICH for before, word in pairwise(words))


def names_done(words: Sequence[str]) -> bool:
    """`generated image`, `the transcribed text`: what was made, by how it was made."""
    rest = [word for word in words if word not in ("the", "a", "an")]
    return 2 <= len(rest) <= 3 and rest[0] in DONE and rest[-1] in GIVEN
