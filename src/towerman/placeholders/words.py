"""The words that placeholders are made of, and how a text falls into words.

House rules. Lower case, singular and plural both where both are written. Nothing here decides.

Not here: what an argument is for (roles), what a text says of itself (reading).
"""

from __future__ import annotations

from typing import Final

from towerman.placeholders.patterns import WORD

MOST: Final = 160
"""Characters of a text that may be a placeholder as a whole."""


def words_of(text: str) -> list[str]:
    """The words of the beginning of a text, in lower case: `ticketId`, `ticket-id` and `TICKET_ID` are the same two."""
    return [word.lower() for word in WORD.findall(text[:MOST])]


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


RESULTS: Final = _set("result results output outputs response responses return returned returns retval")
"""What a call gives."""

STEPS: Final = _set("step steps call calls tool task node action subtask invocation e")
"""What gives it."""

CALL_IDS: Final = _set("call toolu tooluse fc chatcmpl")
"""What the ids begin with that providers give to calls."""

BEFORE: Final = _set("previous prev prior preceding earlier above aforementioned")
"""Which one it was."""

NEWEST: Final = _set("first last latest new newest created")
"""Which of several it is, of those that calls give."""

NUMBERED: Final = _set("first second third fourth last final next same")
"""The same in words that have other uses."""

DONE: Final = _set(
    "generated transcribed translated extracted created returned retrieved fetched resulting computed calculated "
    "converted downloaded processed selected found obtained produced captured rendered resized edited cropped "
    "summarized summarised detected uploaded colorized combined"
)
"""What was done to what a call gives: `generated image`."""

GIVEN: Final = _set(
    "image images picture photo text texts audio video file files document url link id ids path transcript "
    "transcription"
    "translation summary caption sound speech content data answer list total price amount value number code address"
)
"""What calls give."""

FILLERS: Final = _set("the a an this that its new of from by in for to my actual real some")

KINDS: Final = _set("id ids uuid guid identifier")
"""Words that no identifier is made of, and every placeholder for one."""

PLACES: Final = _set("url uri link href path file filename image audio video picture photo document")

AMOUNTS: Final = _set("amount price cost total sum average mean count quantity number balance value result rate")

BLANKS: Final = _set("tbd tba todo placeholder xxx xxxx xxxxx changeme dummy fixme")
"""A gap, whoever fills it."""

MISSING: Final = _set("unknown undefined unspecified unavailable na")
"""A gap that nobody fills: in an identifier only."""

PROGRAMMING: Final = _set(
    "how what syntax error errors docs documentation python javascript typescript vue react angular jinja handlebars "
    "bash shell regex html css template templates interpolation variable variables string format formatting "
    "tag element"
    "tutorial meaning mean code function component rust java java8 golang php ruby kotlin swift sql generics type"
)
"""Words beside which a search is for what the characters mean."""

DATES: Final = _set("date datetime timestamp deadline time when")

ENDINGS: Final = _set(
    "csv json txt pdf png jpg jpeg gif svg md html htm xml yaml yml xls xlsx doc docx pptx log mp3 mp4 wav zip "
    "tar gz py"
    "js ts sql db parquet out com org net io dev app de uk eu gov edu"
)
"""What comes after the last dot of files and hosts."""

VERBS: Final = _set("get fetch find search lookup create load read query call list compute calculate retrieve")

AWAITED: Final = _set("pending await awaiting waiting depends")
"""What a model says of what it does not have yet."""

TIMES: Final = _set("until after once when yet later")
"""When it will be there."""

OPEN: Final = _set(
    "unknown pending awaiting until lookup resolve resolved needs needed later placeholder unavailable determined "
    "provided filled replaced dynamic tbd todo dummy derived obtained"
)
"""What a name made of words says of something that is not there: `TO_BE_RESOLVED`."""

POINTERS: Final = _set("the that this whatever same just")
"""No identifier is made of these."""

BLANK_PHRASES: Final = (
    ("will", "be"),
    ("to", "be", "determined"),
    ("to", "be", "filled"),
    ("to", "be", "provided"),
    ("to", "be", "replaced"),
    ("to", "be", "announced"),
    ("to", "be", "added"),
    ("fill", "in"),
    ("fill", "me"),
    ("replace", "me"),
    ("replace", "with"),
    ("replace", "this"),
    ("change", "me"),
    ("insert", "here"),
    ("same", "as", "above"),
    ("see", "above"),
    ("as", "above"),
    ("not", "available"),
    ("not", "provided"),
    ("not", "yet", "known"),
)

TYPES: Final = _set("string integer number boolean str int float bool uuid object array")

LOOKUPS: Final = _set("search lookup find found get fetch query list database api")
"""What calls do that give identifiers."""

NOUNS: Final = _set(
    "name firstname lastname surname recipient sender customer client user company organization organisation business "
    "title position date time day month year email mail phone number address city country state location venue amount "
    "price total order product item invoice ticket link url website details signature role department event code id "
    "insert enter your my add topic subject guest value"
)
"""What a letter leaves open: `[Customer Name]`, `[Your Company]`."""

TAGS: Final = _set(
    "a abbr article aside b body br button canvas caption center cite code col dd del details div dl dt em fieldset "
    "figcaption figure font footer form h1 h2 h3 h4 h5 h6 head header hr html i iframe img input kbd label legend li "
    "link main mark meta nav ol option output p path picture pre progress q rect s samp script section select small "
    "source span strong style sub summary sup svg table tbody td template textarea tfoot th thead time title "
    "tr track u"
    "ul var video audio data dialog object circle line g text"
)
"""Elements of HTML and SVG."""

STRUCTURE: Final = TAGS - _set(
    "address caption code data details label link output path source summary text time title video audio object input "
    "img picture table article body script style template template"
)
"""Those that are no names of what an argument may hold."""

VARIABLES: Final = _set(
    "home path user pwd tmpdir tmp temp shell lang appdata localappdata userprofile programfiles windir systemroot "
    "homepath homedrive xdg_config_home xdg_data_home xdg_cache_home workspace github_workspace pythonpath java_home "
    "gopath hostname logname"
)
"""Variables of the environment that stand in paths."""

TAGGED: Final = _set("new re fw fwd urgent updated confirmed action test draft internal external hold cancelled closed")
"""What a subject is marked with: `[New Order]`."""

ENTITIES: Final = _set(
    "user username customer order invoice ticket product account email city country location address image audio video "
    "file document url path recipient date origin destination"
)
"""Arguments whose own name is no value of theirs."""

SAID: Final = _set(
    "is are was were am be has have had must should will would shall can cannot could may might does do did isn aren "
    "wasn weren hasn haven hadn doesn don didn won wouldn shouldn couldn looks looked seems seemed appears appeared "
    "needs needed lacks lacked shows showed says said contains contained takes took fails failed works worked means "
    "meant ended ends broke breaks arrived arrives came comes went goes differs differed changed changes"
)
"""Words with which something is said of what stands before them: a text with one is a sentence, not a name for it."""

WHICH: Final = _set("that which who whose where as if when")
"""Words behind which nothing is said of the whole, only of what it is."""
