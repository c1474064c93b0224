"""The patterns by which texts are read.

House rules. Every repeat is possessive and bounded, or the last thing in its pattern, so that no text makes one
step back: a search takes time in the length of the text, and no more. A test looks at all of them.

Not here: what is meant by what they find (reading).
"""

from __future__ import annotations

import re
from typing import Final

WORD: Final = re.compile(r"[A-Z]++[a-z]*+|[a-z]++|[0-9]++|[^\W\d_A-Za-z]++")
"""A word: `ticketId` has two."""

GAP: Final = re.compile(
    r"\$?\{\{\{?+(?P<mustache>[^{}]{1,120}+)\}\}\}?+"
    r"|[$#@%]\{(?P<dollar>[^{}]{1,120}+)\}"
    r"|\{(?P<brace>[A-Za-z_][^{}]{0,80}+)\}"
    r"|<{1,3}+(?P<angle>[^<>]{1,120}+)>{1,3}+"
    r"|\[\[?+(?P<square>[A-Za-z_][^\[\]]{0,80}+)\]\]?+"
    r"|%\((?P<named>\w{1,60}+)\)[sdif]"
    r"|%(?P<percent>[A-Za-z_]\w{1,60}+)%"
    r"|(?<![A-Za-z0-9_])__(?P<dunder>[A-Z][A-Z0-9]{0,30}+(?:_[A-Z0-9]{1,30}+){0,6}+)__"
    r"|\$(?P<var>var_?[0-9]{1,4}+(?:[.\[][^$\n]{0,80}+)?+)\$"
    r"|(?<![\w$])\$(?P<name>[A-Za-z_]\w{0,60}+(?:\.\w{1,60}+|\[[\w'\"-]{0,40}+\]){0,12}+)\$?+(?![\w(])"
    r"|(?<![\w#&])\#(?P<mark>E[0-9]{1,3}+)(?!\w)"
)
"""A stretch that may be left open, by its style."""

ANGLED: Final = re.compile(r"[A-Za-z_][\w .,'\u2019:;#()\[\]-]{0,118}+(?<![ /])")
"""Between angle brackets: words, or a name; no element with attributes, no address, no mention, no closing tag."""

BRACED: Final = re.compile(r"\s{0,3}+[A-Za-z_][\w .'\[\]-]{0,80}+")
"""Between braces."""

SQUARED: Final = re.compile(r"[A-Za-z_][\w .,'\u2019/-]{0,80}+")
"""Between square brackets."""

INDEX: Final = re.compile(r"(?:-[0-9]{1,3}+|(?:\.\w{1,60}+|\[[\w'\"-]{0,40}+\]){1,6}+)?+")
"""Behind a gap: `<GENERATED>-0`, `{{user}}.id`."""

DOUBLED: Final = re.compile(
    r"(?:##|@@|~~|\|\||==|\*\*|\xab|\u2039) ?+"
    r"(?P<inner>[A-Za-z_][\w.'-]{0,40}+(?: [\w.'-]{1,40}+){0,5}+)"
    r" ?+(?:##|@@|~~|\|\||==|\*\*|\xbb|\u203a)"
)
"""`##ORDER_ID##`. A blank inside goes with the word behind it."""

NOTHING: Final = re.compile(
    r"[<{]{1,2}+(?:\.{2,3}+|\u2026|\?{1,3}+|_{1,5}+|[0-9]{1,2}+)[>}]{1,2}+"
    r"|\[{1,2}+(?:\.{3}|\u2026|\?{1,3}+|_{1,5}+)\]{1,2}+"
)
"""`<...>`, `{0}`: a gap without a word."""

REFERRING: Final = re.compile(
    r"\{\s{0,3}+\"\$?+(?:ref|from|result|output|from_call|from_step|output_of|result_of)\"\s{0,3}+:.{0,150}+", re.DOTALL
)
"""An object that refers to something, as text."""

POINTED: Final = re.compile(r"[@&!~^%]{1,2}+(?P<word>[A-Za-z]\w{2,40}+)(?P<path>(?:\.\w{1,60}+){0,6}+)")
"""`@prev`, `@find_user.id`."""

ARROW: Final = re.compile(r"(?P<name>[a-z]{2,20}+_\w{1,40}+) ?+(?:->|=>|::|>|\|) ?+[A-Za-z_][\w.]{0,60}+")
"""`find_user -> id`."""

COMPUTED: Final = re.compile(r"\$\([^()]{1,100}+\)(?:[.\[].{0,80}+)?+")
"""`$(get_id)`."""

DOTTED: Final = re.compile(r"[A-Za-z_]\w{0,60}+(?:\.\w{1,60}+|\[[\w'\"-]{0,40}+\]){1,12}+")
"""A path of names: `steps.lookup[0].id`."""

MONEYED: Final = re.compile(r"\$(?P<number>[0-9]{1,3}+)(?![\w.])")
"""`$1`."""

NUMBERED_NAME: Final = re.compile(r"\$[0-9]{1,2}+(?:\.[A-Za-z_]|\[).{0,120}+")
"""`$1.city`."""

CALLED: Final = re.compile(r"(?P<name>[A-Za-z_]\w{1,60}+)\([^()]{0,100}+\)(?:[.\[].{0,100}+)?+")
"""`get_user(id=42).city`."""

STEP: Final = re.compile(
    r"(?P<of>call|step|task|node|action|tool|subtask)s?+[ _#-]{0,2}+(?P<number>[0-9]{1,4}+)", re.IGNORECASE
)
"""`call_0`, `step 2`."""

INTO_STEP: Final = re.compile(
    r"(?P<head>(?:call|step|task|node|action|tool|var|toolu|fc|chatcmpl)s?+[ _-]?+[A-Za-z0-9]{1,40}+)"
    r"(?P<tail>[.\[#/(].{0,120}+)",
    re.IGNORECASE,
)
"""`step_1.output`, `call_abc.files[0]`."""

IDENTIFIER: Final = re.compile(r"[A-Za-z_$][\w$]{0,100}+")
"""One name: `previous_result`."""

HEAD: Final = re.compile(r"[A-Za-z0-9_ -]{0,80}+")
"""What a text begins with, up to what reaches into it."""

REACHES: Final = re.compile(r"(?:\.[A-Za-z_]|\[|\(\)|#).{0,120}+")
"""What reaches into a result: `.id`, `[0]`, `()`."""

SEGMENT: Final = re.compile(
    r"/(?::[A-Za-z_]\w{0,60}+|ID|UUID|[A-Z]{2,20}+(?:_[A-Z]{2,20}+){0,3}+(?:(?<=_ID)|(?<=_KEY)|(?<=_TOKEN)|(?<=_NAME)|(?<=_NUMBER)|(?<=_HERE)))(?=[/?#]|\Z)"
)
"""A part of a path that is left open: `/users/:id`, `/users/USER_ID`."""

CAPITALS: Final = re.compile(r"/[A-Z]{2,20}+_")
"""What may begin such a part."""

CROSSED: Final = re.compile(r"[A-Za-z]{1,8}+[_-](?:X{4,40}+|x{4,40}+)")
"""An identifier that is crossed out: `cus_XXXXXXXX`."""

NUMBERED_SIGN: Final = re.compile(r"#[0-9]")
"""`#14`."""

QUOTED: Final = re.compile(r"`[^`]{1,2000}+`")
"""Code in a message."""
