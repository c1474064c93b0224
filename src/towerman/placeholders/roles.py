"""What an argument is for: told by its schema, its name, its description and the words of its tool.

Theory. The same text is a reference in one argument and content in another: `$1` is no identifier and may be a price,
`{{name}}` is no customer and may be a template. So each argument gets a role when its tool is declared, and the role
says how much a text in it has to say before it is taken for a placeholder.

House rules. A schema says more than a name, and a name more than a description. Recursive schemas become circles of
spots, never endless ones. Nothing here looks at a value.

Not here: what a text says of itself (reading), what follows from both (judging).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

from towerman.arguments import as_list, as_mapping, branches_of, resolve
from towerman.placeholders.words import DATES, words_of

Role = Literal["exact", "number", "place", "plain", "label", "text", "query", "code", "form"]
"""An identifier, address or date; a number or flag; a file or URL; any short value; the name of a column, field or
variable; prose; a search; code, patterns and markup; a template."""

STRICT: Final[frozenset[Role]] = frozenset({"exact", "number", "place"})
"""Roles in which only the real value is of use."""


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_EXACT: Final = _set(
    "id ids uuid guid identifier token secret email emails mail sku isbn iban recipient recipients to cc bcc reference "
    "apikey assignee channel username login"
)
_KEYS: Final = _set("api access secret license private public object primary issue idempotency account")
_CODES: Final = _set(
    "country zip postal promo currency product booking confirmation airport area discount coupon tracking state bank "
    "language airline station iata item verification access pin"
)
_NUMBER: Final = _set(
    "amount price cost total quantity count age limit latitude longitude lat lon lng size width height budget balance "
    "percent percentage rate duration discount fee tip tax salary weight score"
)
_MONEY: Final = _set(
    "amount price cost total fee tip tax budget value max min prize bid offer bet charge payment worth deposit "
    "fare refund"
)
_UNSURE: Final = _set("to channel assignee reference")
_PLACE: Final = _set(
    "url urls uri link links href path paths file files filename filepath folder dir directory image images "
    "img picture"
    "photo audio video document documents pdf attachment attachments media endpoint src webpage website"
)
_TEXT: Final = _set(
    "text texts body message messages content contents note notes comment comments description summary bio details "
    "reason prompt instructions caption answer reply post tweet feedback explanation story article essay transcript "
    "paragraph letter review title subject headline label remark remarks memo question greeting signature task goal"
)
_QUERY: Final = _set("query queries q search keyword keywords term terms phrase topic word words")
_CODE: Final = _set(
    "code script command cmd sql regex regexp pattern patterns glob expression expr formula equation function selector "
    "xpath jsonpath css xml yaml yml toml json schema filter filters where condition latex tex program graphql cypher "
    "snippet cron diff patch statement math calculation"
)
_MARKUP: Final = _set("html markdown md")
_FORM: Final = _set("template templates format layout mask boilerplate placeholder placeholders")
_LABEL: Final = _set(
    "column columns field fields attribute attributes property properties key keys variable variables var env type "
    "types parameter parameters header headers metric dimension sort orderby groupby index tool function class method "
    "tag tags category categories status state"
)
_EDITS: Final = _set("old new find replace replacement search")
_SHORT: Final = _set("string str text value")

_NAMES_THINGS: Final = _set(
    "column variable variables env environment field table index function class method tool tools attribute property "
    "schema constant parameter enum alias symbol config setting settings"
)
_FORMS: Final = _set(
    "template templates boilerplate render merge campaign campaigns newsletter snippet snippets route router routes "
    "macro macros openapi swagger mock mocks scaffold i18n locale jinja jinja2 mustache handlebars liquid mailmerge"
)
_DRAFTED: Final = _set("workflow workflows pipeline pipelines prompt prompts endpoint webhook automation form rule")
_DRAFTS: Final = _set("create save update define register write edit add set store put")
_CODES_TOOL: Final = _set(
    "code grep ripgrep rg sql shell bash sh exec python javascript js typescript terminal regex regexp jq graphql "
    "cypher mongo docker kubectl git repo lint compile xpath css html latex tex powershell awk sed jsonpath eval "
    "evaluate script codebase source"
)
_FILES: Final = _set("write file files edit patch append insert replace save")
_STORES: Final = _set("page wiki doc docs document note notes readme article blog knowledge memory log gist snippet")
_MAKES: Final = _set("create add update schedule book set make open submit register report request order plan")
_RUNS: Final = _set("run exec execute eval evaluate terminal shell bash sql python")
_MATHS: Final = _set("calculate calculator math maths compute arithmetic evaluate solve")
_LOOKS: Final = _set("search grep find replace edit write save create format lint validate render check")
_SENDS: Final = _set(
    "send email mail sms message post reply notify notification tweet publish submit dm comment broadcast say speak "
    "announce respond answer invite chat whatsapp slack"
)
_TEMPLATE_WORDS: Final = _set(
    "template templates placeholders jinja mustache handlebars boilerplate merge interpolated"
)
_CODE_WORDS: Final = _set("regex regexp sql glob jsonpath xpath graphql expression jq cypher latex shell")


class Words:
    """A tool's own words.

    Args:
        name: of the tool.
        description: of the tool.
    """

    __slots__ = ("codes", "files", "forms", "makes", "maths", "names", "runs", "sends", "words")

    def __init__(self, name: str, description: str) -> None:
        self.words = words = frozenset(words_of(name))
        said = frozenset(words_of(description))
        drafts = bool(words & _DRAFTED and words & _DRAFTS)
        self.forms = drafts or bool(words & _FORMS) or bool(said & _TEMPLATE_WORDS)
        self.codes = bool(words & _CODES_TOOL) or bool(said & {"code", "regex", "sql", "shell"})
        self.files = bool(words & _FILES) and not words & _SENDS - {"post", "comment"}
        self.sends = bool(words & _SENDS)
        self.makes = bool(words & _MAKES) and not self.files and not words & _STORES
        self.names = bool(words & _NAMES_THINGS)
        self.maths = bool(words & _MATHS)
        self.runs = bool(words & _RUNS) and not words & _LOOKS


class Spot:
    """A place in the arguments of a tool, with what may stand there.

    Attributes:
        role: what it is for.
        own: the words of its name.
        identifies: it names one thing, by its name or its format: `unknown` is no value of it.
        dated: it is a date or a time, for which there are many words.
        money: `$1` may be a price here.
        known: values that the schema itself names: its enum, examples and default.
        free: what is written there is no business of the guard's.
        described: whether the schema names it; what it does not name is shown as `*`.
        fields: places inside an object, by name.
        item: the place of each entry of a list; None: like this one.
        tool: the words of its tool.
    """

    __slots__ = ("dated", "described", "known", "fields", "free", "identifies", "item", "money", "own", "role", "tool")

    def __init__(self, own: tuple[str, ...], role: Role, tool: Words) -> None:
        self.own = own
        self.role: Role = role
        self.tool = tool
        self.dated = not DATES.isdisjoint(own[-1:])
        self.identifies = role == "exact" and not self.dated and _UNSURE.isdisjoint(own[-1:])
        self.money = not _MONEY.isdisjoint(own)
        self.known: frozenset[object] = frozenset()
        self.free = False
        self.described = True
        self.fields: dict[object, Spot] = {}
        self.item: Spot | None = None


def spot_named(name: object, spot: Spot) -> Spot:
    """The place of a name inside another place that no schema speaks of."""
    own = tuple(words_of(name)) if isinstance(name, str) else ()
    made = Spot(own, spot.role if spot.role in ("code", "form") else _role(own, [], frozenset(), spot.tool), spot.tool)
    made.described = False
    return made


def spots_of(schema: Mapping[str, object], tool: Words) -> Spot:
    """The place of all arguments together, with the others inside it.

    Args:
        schema: JSON schema of the arguments.
        tool: the words of the tool.
    """
    return _Reader(schema, tool).spot("", schema)


class _Reader:
    """Reads one schema."""

    def __init__(self, root: Mapping[str, object], tool: Words) -> None:
        self._root = root
        self._tool = tool
        self._known: dict[tuple[int, str], Spot] = {}

    def spot(self, name: str, node: object) -> Spot:
        """The place with this name and schema. Iterative: a schema may be as deep as it likes."""
        first, waiting = self._made(name, node)
        while waiting:
            spot, nodes = waiting.pop()
            for one in nodes:
                for field, sub in as_mapping(one.get("properties")).items():
                    if field not in spot.fields:
                        spot.fields[field], more = self._made(field, sub)
                        waiting += more
                items = one.get("items")
                if spot.item is None and isinstance(items, dict):
                    # Entries are named after their list: the entries of `image_ids` are ids.
                    spot.item, more = self._made("_".join(spot.own), items)
                    waiting += more
        return first

    def _made(self, name: str, node: object) -> tuple[Spot, list[tuple[Spot, list[Mapping[str, object]]]]]:
        found = resolve(self._root, node)
        key = id(found), name
        known = self._known.get(key)
        if known is not None:
            return known, []
        nodes = self._branches(found)
        own = tuple(words_of(name))
        said = " ".join(str(one["description"]) for one in (as_mapping(node), *nodes) if "description" in one)
        spot = Spot(own, _role(own, nodes, frozenset(words_of(said)), self._tool), self._tool)
        formats = {one.get("format") for one in nodes}
        spot.dated = spot.dated or bool(formats & {"date", "date-time", "time"})
        spot.identifies = bool(formats & {"uuid", "email"}) or (spot.identifies and not spot.dated)
        spot.known = frozenset(
            option
            for one in nodes
            for option in [
                *as_list(one.get("enum")),
                *as_list(one.get("examples")),
                one.get("const"),
                one.get("default"),
            ]
            if isinstance(option, str)
        )
        self._known[key] = spot
        return spot, [(spot, nodes)]

    def _branches(self, node: Mapping[str, object]) -> list[Mapping[str, object]]:
        """A schema and its alternatives, each behind its references."""
        out: list[Mapping[str, object]] = []
        waiting = [node]
        while waiting and len(out) < 64:
            one = waiting.pop()
            if any(one is other for other in out):
                continue
            out.append(one)
            waiting += [resolve(self._root, sub) for sub in (*branches_of(one), *as_list(one.get("allOf")))]
        return out


def _types(nodes: Iterable[Mapping[str, object]]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        kind = node.get("type")
        found.update(map(str, as_list(kind)) if isinstance(kind, list) else [str(kind)] if kind else [])
    return found - {"null"}


def _role(own: tuple[str, ...], nodes: list[Mapping[str, object]], said: frozenset[str], tool: Words) -> Role:
    """What an argument is for."""
    types = _types(nodes)
    if types and types <= {"integer", "number", "boolean"}:
        return "number"
    formats = {str(node.get("format")) for node in nodes}
    if formats & {"uuid", "email", "date", "date-time", "time", "ipv4", "ipv6", "hostname", "duration"}:
        return "exact"
    if formats & {"regex", "json-pointer", "relative-json-pointer", "uri-template"}:
        return "code"
    role = _by_name(own, tool)
    if formats & {"uri", "uri-reference", "iri", "url"}:
        role = "place"
    if role in ("exact", "number"):
        return role
    if said & _TEMPLATE_WORDS or (tool.forms and role != "query"):
        return "form"
    if role != "place" and (said & _CODE_WORDS or (tool.codes and role in ("query", "text", "plain"))):
        return "code"
    return role


def _by_name(own: tuple[str, ...], tool: Words) -> Role:
    """The same by the name alone, and the name of the tool."""
    if not own:
        return "plain"
    last, before = own[-1], frozenset(own[:-1])
    if last.isdigit() and before:
        return _by_name(own[:-1], tool)
    if last in _FORM or before & _FORM:
        return "form"
    if last == "code":
        return "exact" if before & _CODES else "code"
    if last == "key":
        return "exact" if before & _KEYS else "label"
    if last in ("number", "no"):
        return "exact" if before else "plain"
    if before & _EDITS and last in _SHORT:
        return "code"
    if last in _EXACT or last in DATES:
        return "exact"
    if last in _MARKUP:
        return "text" if tool.sends else "code"
    if before & {"column", "field", "variable", "tool", "function", "class", "parameter", "attribute", "table"}:
        return "label"
    if last in _LABEL and last not in _TEXT:
        return "label"
    if last == "name" and tool.names:
        return "label"
    for words, role in _LASTS:
        if last in words:
            return role
    return "plain"


_LASTS: Final[tuple[tuple[frozenset[str], Role], ...]] = (
    (_QUERY, "query"),
    (_CODE, "code"),
    (_NUMBER, "number"),
    (_PLACE, "place"),
    (_TEXT, "text"),
)
