"""Options that come from outside the code: `towerman.toml`, the environment, and rules for tools by pattern.

Theory. For each option there are four places, and the first that gives it counts: an argument, a `TOWERMAN_*` variable
of the environment, the file, the default. For a tool these are: what is given at the tool, `Tower.policy`, the file,
the tower's own option. `load` reads a file (or a mapping of the same form) into a frozen `Config`. It looks at
everything first and tells every mistake at once, each with the file, the key and what is allowed; only a file without
a mistake has a `Config`, so that a change can be compared and refused before anything is touched.

Rules name tools by pattern. Of several that match a tool the most specific one wins, for each option by itself: an
exact name before a pattern, then the one with more literal characters (those outside of `*`, `?` and `[...]`), then the
later one. `independent` and what a tool touches are one question: a stronger answer replaces a weaker one whole.

`${NAME}` in a text of the file stands for a variable of the environment, `$${` for `${` itself. Neither messages nor
`repr` show a variable's value.

House rules. What an option may be is asked of the tables in policy and said nowhere else; the JSON schema is made of
the same tables. Nothing of the environment is kept beyond what was read.

Not here: what options mean (policy), which of them a tower takes while it runs (tower).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import translate
from functools import lru_cache
from types import MappingProxyType
from typing import Final, cast, get_args

from towerman.budgets import MOST
from towerman.errors import PolicyError
from towerman.policy import (
    ENGINE,
    KINDS_OF_STORAGE,
    MOST_SECONDS,
    POOL,
    RESERVED_POOLS,
    TOOL,
    TOWER,
    UNITS,
    VARIABLE,
    Attempts,
    Breaker,
    Budget,
    CircuitBreaker,
    Condition,
    Engine,
    EngineAt,
    Flag,
    FreeText,
    FromEnvironment,
    Function,
    Kind,
    Location,
    Option,
    Per,
    Pool,
    Rate,
    RateLimit,
    Repeats,
    Seconds,
    Secret,
    Shares,
    Spending,
    Storage,
    Templates,
    TowerPolicy,
    Whole,
    Word,
    budgets_of,
    check_contradictions,
    check_deferring,
    check_limits,
    check_reserve,
    nearest,
    pool_name,
    pools_of,
    shown,
    tool_options,
    with_preset,
    word,
)

Source = str | os.PathLike[str] | Mapping[str, object]
"""A path of a `towerman.toml`, or a mapping of the same form."""

PREFIX: Final = "TOWERMAN_"
"""What the names of variables begin with that give options: `TOWERMAN_MAX_CONCURRENCY`."""

FILE_VARIABLE: Final = "TOWERMAN_CONFIG"
"""The variable that names the file of towers that are made without one."""

MAX_FILE_BYTES: Final = 1_000_000
"""Largest file that is read."""

MAX_TOLD: Final = 10
"""Mistakes of one file that are told."""

TOOL_KEYS: Final = tuple(key for key, option in TOOL.items() if not isinstance(option.kind, Function))
"""Options of tools that a file can give."""

TOWER_KEYS: Final = {key: option for key, option in TOWER.items() if not isinstance(option.kind, Function)}
"""Options of a tower that a file and the environment can give."""

_BARE: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")
_PATTERN: Final = re.compile(r"[A-Za-z0-9_.\-*?\[\]!]{1,256}")
_WILD: Final = re.compile(r"\[[^\]]+\]|[*?]")
_OPENING: Final = re.compile(r"\$(\$?)\{([^{}]*\}?)")
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}")
_FLAGS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}


# -------------------------------------------------------------------------------------------- rules for tools


@lru_cache(maxsize=1024)
def _matcher(pattern: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile(translate(pattern)).match


@dataclass(frozen=True, slots=True, repr=False)
class Rule:
    """Options for the tools whose names fit a pattern.

    Args:
        pattern: an exact name, or one with `*`, `?` and `[...]`.
        options: checked, a preset written out.
        origin: where they were given, for messages.
    """

    pattern: str
    options: Mapping[str, object]
    origin: str = field(compare=False)

    @property
    def rank(self) -> tuple[bool, int]:
        """How specific it is: an exact name above all, then by literal characters."""
        return _WILD.search(self.pattern) is None, len(_WILD.sub("", self.pattern))

    def fits(self, name: str) -> bool:
        """Does it speak of this tool?"""
        return _matcher(self.pattern)(name) is not None

    def __repr__(self) -> str:
        return f"Rule({self.pattern!r}, {', '.join(self.options)})"


def rule(pattern: object, options: Mapping[str, object]) -> Rule:
    """A rule given in code: `tower.policy("crm_*", timeout=5)`.

    Raises:
        PolicyError: no pattern, or an option that is wrong or no option of a rule.
    """
    if not isinstance(pattern, str) or not _PATTERN.fullmatch(pattern):
        raise PolicyError(f"policy: a tool's name or a pattern such as 'crm_*'; got {shown(pattern)}")
    where = f"policy {pattern!r}"
    return Rule(pattern, MappingProxyType(tool_options(where, options)), f"tower.{where}")


def overlaid(rules: Sequence[Rule], later: Sequence[Rule]) -> tuple[Rule, ...]:
    """One layer of rules with further ones behind them, without what these make void: a layer that is changed again and
    again does not grow.

    Of an earlier rule for the very same pattern an option is void that is given again. What is said of the access stays
    where it also takes away what weaker rules say, and what is given again does not.
    """
    found = list(rules)
    for one in later:
        kept = []
        for before in found:
            if before.pattern == one.pattern:
                options = {key: value for key, value in before.options.items() if not _void(key, value, one.options)}
                if not options:
                    continue
                before = replace(before, options=MappingProxyType(options))
            kept.append(before)
        found = [*kept, one]
    return tuple(found)


def _void(key: str, value: object, later: Mapping[str, object]) -> bool:
    return key in later and not (key in ("independent", "sequential") and value is True and later[key] is not True)


def laid_out(
    name: str, given: Mapping[str, object], *layers: Sequence[Rule]
) -> tuple[Mapping[str, object], Mapping[str, str]]:
    """The options of one tool out of all that was said about it.

    Args:
        name: of the tool.
        given: at the tool itself, not checked yet; it wins. None means "not given".
        layers: rules, the weakest layer first.

    Returns:
        The options, and where those were given that were not given at the tool.
    """
    matching = [one for layer in layers for one in sorted(layer, key=lambda rule: rule.rank) if one.fits(name)]
    if not matching:
        return given, {}
    if given.get("preset") is not None:
        word(f"tool {name!r}: preset", given["preset"], cast("Word", TOOL["preset"].kind).literal)
    own = with_preset({key: value for key, value in given.items() if value is not None})
    options: dict[str, object] = {}
    origins: dict[str, str] = {}
    for stronger, origin in [*((one.options, one.origin) for one in matching), (own, "")]:
        if stronger.get("independent") is True:
            for key in ("reads", "writes", "sequential"):
                options.pop(key, None)
        elif "reads" in stronger or "writes" in stronger or stronger.get("sequential") is True:
            options.pop("independent", None)
        options.update(stronger)
        origins.update(dict.fromkeys(stronger, origin))
    return options, {key: origin for key, origin in origins.items() if origin and key in options}


def blame(error: PolicyError, origins: Mapping[str, str]) -> PolicyError:
    """The same error, with the places outside of the code that the options in it come from."""
    told = str(error)
    places = [f"{key} is given in {origin}" for key, origin in origins.items() if re.search(rf"\b{key}\b", told)]
    return PolicyError("; ".join([told, *places])) if places else error


# -------------------------------------------------------------------------------------------- a file


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    """What a `towerman.toml` says, checked. Two are equal when they say the same, whatever the file is called.

    Args:
        options: the tower's options by name.
        pools: its pools by name.
        budgets: its budgets by whom they count for.
        tools: rules for tools, in the order of the file.
        path: the file, or None for a mapping.
    """

    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    pools: Mapping[str, Pool] = field(default_factory=lambda: MappingProxyType({}))
    budgets: Mapping[str, Budget] = field(default_factory=lambda: MappingProxyType({}))
    tools: tuple[Rule, ...] = ()
    path: str | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        what = "a mapping" if self.path is None else repr(self.path)
        return f"Config({what}: {len(self.options)} options, {len(self.pools)} pools, {len(self.tools)} tools)"


def load(source: Source, environ: Mapping[str, str] | None = None) -> Config:
    """Read and check a file, or a mapping of the same form.

    Args:
        source: its path, or the mapping.
        environ: the variables that `${NAME}` stands for; default: those of the process.

    Raises:
        PolicyError: it cannot be read, or something in it is wrong: every mistake with its file, its key, what is
            allowed and the nearest right key; a mistake of syntax with its line and column.
    """
    environ = os.environ if environ is None else environ
    if isinstance(source, Mapping):
        return _Reader("config", environ).config(source, None)
    if not isinstance(source, str | os.PathLike):
        raise PolicyError(f"config: the path of a towerman.toml, or a mapping of its keys; got {shown(source)}")
    path = os.fspath(source)
    if not isinstance(path, str):
        raise PolicyError(f"config: a path is text; got {type(path).__name__}")
    return _Reader(_named(path), environ).config(_table(path), path)


def _named(path: str) -> str:
    """How a file is called in messages: on one line, not too long."""
    told = path if path.isprintable() else ascii(path)
    return told if len(told) <= 200 else f"...{told[-197:]}"


def _table(path: str) -> Mapping[str, object]:
    import tomllib

    name = _named(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise PolicyError(f"config {name!r}: there is no such file") from None
    except OSError as error:
        raise PolicyError(f"config {name!r}: cannot be read: {error.strerror or type(error).__name__}") from None
    except ValueError:  # a NUL, or a character that no file name can have
        raise PolicyError(f"config {name!r}: this is no file name") from None
    if len(data) > MAX_FILE_BYTES:
        raise PolicyError(f"{name}: larger than {MAX_FILE_BYTES:,} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise PolicyError(f"{name}, line {line}, column {column}: not UTF-8 text") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, place = _syntax(str(error), text)
        raise PolicyError(f"{name}, {place}: {reason}") from None
    except (RecursionError, ValueError):
        raise PolicyError(f"{name}: a value in it is too deep or has too many digits to be read") from None


def _syntax(told: str, text: str) -> tuple[str, str]:
    """The reason and the place in a message of the parser."""
    reason, _, place = told.rpartition(" (at ")
    if place.startswith("line "):
        return reason, place.removesuffix(")")
    lines = text.split("\n")
    return f"{reason or told} at the end of the file", f"line {len(lines)}, column {len(lines[-1]) + 1}"


def _part(key: str) -> str:
    """A key as it is written in TOML, for a path of keys."""
    if _BARE.fullmatch(key):
        return key
    told = key[:80].replace("\\", "\\\\").replace('"', '\\"')
    return f'"{told}"' if told.isprintable() else ascii(told)


class _Reader:
    """Goes through a table once, and collects what is wrong with it."""

    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        self._name = name
        self._environ = environ
        self._faults: list[str] = []

    def config(self, table: Mapping[str, object], path: str | None) -> Config:
        """The whole of it.

        Raises:
            PolicyError: with all that is wrong.
        """
        options: dict[str, object] = {}
        pools: dict[str, Pool] = {}
        tools: list[Rule] = []
        budgets: dict[str, Budget] = {}
        for key, value in table.items():
            if key == "pools":
                pools = self._pools(value)
            elif key == "budgets":
                budgets = self._budgets(value)
            elif key == "tools":
                tools = self._tools(value)
            elif key == "engine" and isinstance(value, Mapping):
                self._engine(options, value)
            elif self._known(key, "", [*TOWER_KEYS, "budgets", "pools", "tools"], value):
                self._value(options, key, key, TOWER[key], value)
        if self._faults:
            raise PolicyError(self._told())
        if path is not None and isinstance(options.get("journal"), str):
            options["journal"] = _beside(path, cast("str", options["journal"]))
        return Config(MappingProxyType(options), MappingProxyType(pools), MappingProxyType(budgets), tuple(tools), path)

    def _told(self) -> str:
        if len(self._faults) == 1:
            return f"{self._name}: {self._faults[0]}"
        told = [f"\n- {fault}" for fault in self._faults[:MAX_TOLD]]
        if len(self._faults) > MAX_TOLD:
            told.append(f"\n- and {len(self._faults) - MAX_TOLD} more")
        return f"{self._name}: {len(self._faults)} mistakes:{''.join(told)}"

    def _known(self, key: object, path: str, known: Sequence[str], value: object) -> bool:
        if isinstance(key, str) and key in known:
            return True
        if not isinstance(key, str):
            place = f"{path[:-1]}: " if path else ""
            self._faults.append(f"{place}a key of type {type(key).__name__[:80]}; keys are text")
            return False
        if len(self._faults) > MAX_TOLD:  # a file of nothing but mistakes takes no longer than another
            self._faults.append("")
            return False
        option = TOOL.get(key) if path.startswith("tools.") else TOWER.get(key) if not path else None
        if option is not None and isinstance(option.kind, Function):
            self._faults.append(
                f"{path}{_part(key)}: a function, which a file cannot hold; give it "
                + ("where the tool is declared, or with tower.policy" if path else f"as an argument: Tower({key}=...)")
            )
            return False
        fault = f"{path}{_part(key)}: no such key{nearest(key, known)}"
        place, _, outer = path[:-1].partition(".")
        if outer and isinstance(value, Mapping) and _BARE.fullmatch(f"{outer}{key}"):
            fault += f'; a name with a dot in it is quoted: [{place}."{outer}.{key}"]'
        self._faults.append(fault)
        return False

    def _value(self, into: dict[str, object], key: str, path: str, option: Option, value: object) -> None:
        """Take one value that is allowed, or say what is."""
        try:
            into[key] = self._checked(path, option.kind, value)
        except PolicyError as wrong:
            self._faults.append(str(wrong))

    def _checked(self, path: str, kind: Kind, value: object) -> object:
        if value is None:  # a mapping may hold it; in code it says "not given"
            raise PolicyError(f"{path}: {kind.allowed}; got None")
        if isinstance(value, str):
            value = self._filled(path, value)
        if isinstance(kind, Templates | Shares) and isinstance(value, Sequence) and not isinstance(value, str):
            listed = [
                self._filled(f"{path}[{index}]", item) if isinstance(item, str) else item
                for index, item in enumerate(value)
            ]
            if not all(isinstance(item, str) for item in listed):
                wrong = next(item for item in listed if not isinstance(item, str))
                raise PolicyError(f"{path}: {kind.allowed}; it holds {shown(wrong)}")
            value = tuple(listed)
        if isinstance(kind, Templates):
            if not isinstance(value, str | tuple):
                raise PolicyError(f"{path}: {kind.allowed}; got {shown(value)}")
            if not value or not all(text.strip() for text in ((value,) if isinstance(value, str) else value)):
                raise PolicyError(f"{path}: {kind.allowed}; it is empty, or holds an empty one")
        if isinstance(kind, Storage) and not isinstance(value, str):
            raise PolicyError(f"{path}: {kind.allowed.partition(', or a')[0]}; got {shown(value)}")
        if isinstance(kind, Flag | Condition) and not isinstance(value, bool):
            raise PolicyError(f"{path}: true or false; got {shown(value)}")
        checked = kind.check(path, value)
        return MappingProxyType(checked) if isinstance(checked, dict) else checked

    def _filled(self, path: str, text: str) -> str:
        """The text with its variables put in."""

        def put(match: re.Match[str]) -> str:
            if match[1]:
                return "${" + match[2]
            written = VARIABLE.fullmatch(match[0])
            if written is None:
                raise PolicyError(f"{path}: '${{' begins a variable such as ${{NAME}}; write '$${{' for '${{' itself")
            name = written[1]
            value = self._environ.get(name)
            if value is None:
                raise PolicyError(f"{path}: the environment has no variable {name[:80]}; set it, or leave the key out")
            return value

        if "${" not in text:
            return text
        filled = _OPENING.sub(put, text)
        return FromEnvironment(filled, text) if _from_outside(text) else filled

    def _tables(self, path: str, value: object, what: str) -> Mapping[object, object]:
        if isinstance(value, Mapping):
            return value
        self._faults.append(f"{path}: {what}; got {shown(value)}")
        return {}

    def _pools(self, value: object) -> dict[str, Pool]:
        pools: dict[str, Pool] = {}
        for key, one in self._tables("pools", value, "tables such as [pools.crm], with permits").items():
            try:
                name = pool_name("pools", key)
            except PolicyError as wrong:
                self._faults.append(str(wrong))
                continue
            path = f"pools.{_part(name)}"
            before = len(self._faults)
            given: dict[str, object] = {}
            if isinstance(one, Mapping):
                for inner, inside in one.items():
                    if self._known(inner, f"{path}.", list(POOL), inside):
                        known = cast("str", inner)
                        self._value(given, known, f"{path}.{known}", POOL[known], inside)
                if "permits" not in one:
                    self._faults.append(f"{path}: permits is missing: {POOL['permits'].kind.allowed}")
            else:
                self._value(given, "permits", path, POOL["permits"], one)
            if len(self._faults) > before:
                continue
            try:
                check_reserve(f"{path}.reserve", cast("int", given.get("reserve", 0)), cast("int", given["permits"]))
            except PolicyError as wrong:
                self._faults.append(str(wrong))
                continue
            pools[name] = Pool(**given)  # type: ignore[arg-type]  # every value was checked above
        return pools

    def _engine(self, options: dict[str, object], value: Mapping[object, object]) -> None:
        before = len(self._faults)
        given: dict[str, object] = {}
        for inner, inside in value.items():
            if self._known(inner, "engine.", list(ENGINE), inside):
                known = cast("str", inner)
                self._value(given, known, f"engine.{known}", ENGINE[known], inside)
        if len(self._faults) == before:
            self._value(options, "engine", "engine", TOWER["engine"], given)

    def _budgets(self, value: object) -> dict[str, Budget]:
        budgets: dict[str, Budget] = {}
        for key, one in self._tables("budgets", value, "tables such as [budgets.run], with calls or tokens").items():
            try:
                if not isinstance(one, Mapping):
                    told = _part(key) if isinstance(key, str) else type(key).__name__[:80]
                    raise PolicyError(f"budgets.{told}: a table such as {{calls = 20, seconds = 60}}; got {shown(one)}")
                filled = {
                    inner: self._filled(f"budgets.{key}.{inner}", inside) if isinstance(inside, str) else inside
                    for inner, inside in one.items()
                }
                for name, budget in budgets_of({key: filled}).items():
                    if budget is not None:
                        budgets[name] = budget
            except PolicyError as wrong:
                self._faults.append(str(wrong))
        return budgets

    def _tools(self, value: object) -> list[Rule]:
        rules: list[Rule] = []
        for key, one in self._tables("tools", value, 'tables such as [tools."crm_*"]').items():
            if not isinstance(key, str) or not _PATTERN.fullmatch(key):
                told = _part(key) if isinstance(key, str) else type(key).__name__[:80]
                self._faults.append(
                    f"tools.{told}: a tool's name or a pattern: letters, digits, '_', '-', '.' and *?[]!"
                )
                continue
            path = f"tools.{_part(key)}"
            before = len(self._faults)
            given: dict[str, object] = {}
            for inner, inside in self._tables(path, one, "a table of options").items():
                if self._known(inner, f"{path}.", TOOL_KEYS, inside):
                    known = cast("str", inner)
                    self._value(given, known, f"{path}.{known}", TOOL[known], inside)
            if len(self._faults) > before:
                continue
            try:
                check_contradictions(path, given)
            except PolicyError as wrong:
                self._faults.append(str(wrong))
            rules.append(Rule(key, MappingProxyType(with_preset(given)), f"{self._name}: {path}"))
        return rules


def _beside(path: str, named: str) -> str:
    """A file that another file names: it is found from there, in whatever folder the program was started."""
    if named == ":memory:":
        return named
    whole = os.path.join(os.path.dirname(os.path.abspath(path)), named)
    return FromEnvironment(whole, named.told) if isinstance(named, FromEnvironment) else whole


def _from_outside(text: str) -> bool:
    return any(not match[1] for match in _OPENING.finditer(text))


# -------------------------------------------------------------------------------------------- the environment


def from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """The tower's options that the environment gives: `TOWERMAN_MAX_CONCURRENCY=8`. An empty one is not given.

    A variable whose name is nearly one of these is logged.

    Raises:
        PolicyError: naming the variable and what is allowed, without its value.
    """
    names = {PREFIX + key.upper(): key for key in TOWER_KEYS}
    given: dict[str, object] = {}
    for name in [name for name in environ if name.startswith(PREFIX)]:
        text = environ[name].strip()
        key = names.get(name)
        if key is not None and text:
            given[key] = _read(name, TOWER[key].kind, text)
        elif key is None and name != FILE_VARIABLE:
            _doubt(name, [*names, FILE_VARIABLE])
    return given


def _doubt(name: str, known: Sequence[str]) -> None:
    import logging
    from difflib import get_close_matches

    near = get_close_matches(name[:80], known, 1, cutoff=0.9)
    if near:
        logging.getLogger("towerman").warning(
            "the environment variable %s is none of Towerman's; did you mean %s?", name[:80], near[0]
        )


def _read(name: str, kind: Kind, text: str) -> object:
    value: object = FromEnvironment(text, f"${{{name}}}")
    if isinstance(kind, Whole) and _NUMBER.fullmatch(text):
        value = int(text)
    elif isinstance(kind, Seconds):
        try:
            value = float(text)
        except ValueError:
            pass  # the check says what is allowed
    elif isinstance(kind, Repeats) and _NUMBER.fullmatch(text):
        value = int(text)
    elif isinstance(kind, Flag):
        value = _FLAGS.get(text.lower(), value)
    try:
        return kind.check(name, value)
    except PolicyError:
        allowed = "true or false" if isinstance(kind, Flag) else kind.allowed
        raise PolicyError(f"{name}, in the environment: {allowed}; its value is not shown") from None


# -------------------------------------------------------------------------------------------- all of it together


def settled(
    source: Source | Config | None, given: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> tuple[Config, dict[str, object]]:
    """The options of a tower out of all the places that may give them.

    Args:
        source: a file, a mapping, or one that was read before; None: the file that `TOWERMAN_CONFIG` names, if any.
        given: the arguments that were given. Pools and budgets are one by one: an argument wins over the file's of its
            name, and a budget of None takes that away.
        environ: the environment; default: that of the process.

    Raises:
        PolicyError: something in the file, the environment or the pools is wrong.
    """
    environ = os.environ if environ is None else environ
    options = from_environment(environ)
    if source is None:
        source = environ.get(FILE_VARIABLE) or Config()
    config = source if isinstance(source, Config) else load(source, environ)
    pools = {**config.pools, **pools_of(given.get("pools"))}
    budgets = {
        name: budget
        for name, budget in {**config.budgets, **budgets_of(given.get("budgets"))}.items()
        if budget is not None
    }
    return config, {**config.options, **options, **given, "pools": pools, "budgets": budgets}


def check_rules(rules: Sequence[Rule], tower: TowerPolicy) -> None:
    """Refuse rules for tools that the tower's own limits could never serve.

    Raises:
        PolicyError: naming the place of the rule.
    """
    for one in rules:
        check_limits(one.origin, one.options, tower.pools, tower.max_concurrency)
        if one.options.get("when_busy") == "defer":
            check_deferring(f"{one.origin}: when_busy='defer': ", tower.journal)


# -------------------------------------------------------------------------------------------- the schema


def schema() -> dict[str, object]:
    """The JSON schema of `towerman.toml`, for editors. What it refuses, `load` refuses."""
    pools = {
        "type": "object",
        "description": "Named limits that tools share.",
        "propertyNames": {"pattern": r"^[A-Za-z0-9_.\-]{1,128}$", "not": {"enum": sorted(RESERVED_POOLS)}},
        "additionalProperties": {
            "anyOf": [
                {"type": "integer", "minimum": 1, "description": POOL["permits"].says},
                {**_object(POOL, POOL, Pool), "required": ["permits"]},
            ]
        },
    }
    budgets = {
        "type": "object",
        "description": "How much may be spent, by whom it counts for.",
        "propertyNames": {"pattern": r"^(batch|run|tenant|process|tenant:[A-Za-z0-9_.\-]{1,128})$"},
        "additionalProperties": _budget_schema(),
    }
    tools = {
        "type": "object",
        "description": "Options of tools, by name or by pattern; the most specific wins.",
        "propertyNames": {"pattern": r"^[A-Za-z0-9_.\-*?\[\]!]{1,256}$"},
        "additionalProperties": _object(TOOL, TOOL_KEYS, None),
    }
    top = _object(TOWER, TOWER_KEYS, TowerPolicy)
    properties = {**cast("dict[str, object]", top["properties"]), "pools": pools, "budgets": budgets, "tools": tools}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "towerman.toml",
        "description": "Limits of a tower, and options of its tools.",
        **top,
        "properties": properties,
    }


def _object(
    options: Mapping[str, Option], keys: Sequence[str] | Mapping[str, Option], kept: type | None
) -> dict[str, object]:
    defaults = {} if kept is None else {one.name: one.default for one in fields(kept)}
    properties: dict[str, object] = {}
    for key in keys:
        option = options[key]
        properties[key] = {"description": option.says, **_of_kind(option.kind)}
        if isinstance(defaults.get(key), str | int | float):
            properties[key]["default"] = defaults[key]  # type: ignore[index]  # a dict, made above
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _of_fields(made: type[Rate] | type[Breaker]) -> dict[str, object]:
    """A table of numbers, as a class takes them."""
    properties = {
        one.name: {"type": "integer", "minimum": 0 if one.name == "reserve" else 1}
        if one.name in ("limit", "burst", "reserve", "failures", "probes")
        else {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": MOST_SECONDS}
        for one in fields(made)
    }
    required = ["limit"] if made is Rate else []
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}


_AMOUNT: Final[Mapping[str, object]] = {"type": "number", "minimum": 0, "maximum": MOST}


def _budget_schema() -> dict[str, object]:
    length = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": MOST_SECONDS}
    return {
        "type": "object",
        "properties": {
            **dict.fromkeys(UNITS, _AMOUNT),
            "seconds": {**length, "description": "Wall time since the run began; only for a run."},
            "per": {"anyOf": [{"enum": list(get_args(Per))}, length], "description": "The window in which it renews."},
            "partial": {"type": "boolean", "default": True, "description": "A batch may be run in part."},
        },
        "propertyNames": {"pattern": r"^[A-Za-z0-9_.\-]{1,128}$"},
        "additionalProperties": _AMOUNT,
        "not": {"propertyNames": {"enum": ["per", "partial"]}},
    }


def _of_kind(kind: Kind) -> dict[str, object]:
    several = {"type": "array", "items": {"type": "string"}}
    match kind:
        case Whole(least):
            return {"type": "integer", "minimum": least}
        case Seconds(zero):
            return {"type": "number", "minimum" if zero else "exclusiveMinimum": 0, "exclusiveMaximum": MOST_SECONDS}
        case Flag() | Condition():
            return {"type": "boolean"}
        case Word():
            return {"anyOf": [{"enum": list(kind.words)}, {"type": "string", "pattern": r"\$\{"}]}
        case Templates():
            text = {"type": "string", "pattern": r"\S"}
            return {"anyOf": [text, {"type": "array", "items": text, "minItems": 1}]}
        case RateLimit():
            text = {"type": "string", "pattern": r"^\s*\d+\s*/\s*\d*\s*[A-Za-z]+\s*$|\$\{"}
            return {"anyOf": [text, _of_fields(Rate)]}
        case Spending():
            units = {"type": "object", "additionalProperties": _AMOUNT, "not": {"required": ["seconds"]}}
            return {"anyOf": [_AMOUNT, units]}
        case Repeats():
            text = {"type": "string", "pattern": r"^any$|\$\{"}
            return {"anyOf": [{"type": "integer", "minimum": 1}, text]}
        case CircuitBreaker():
            return {"anyOf": [{"const": True}, _of_fields(Breaker)]}
        case Shares():
            permits = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}}
            return {"anyOf": [{"type": "string"}, several, permits]}
        case FreeText():
            text = {"type": "string", "pattern": r"\S"}
            return {"anyOf": [{"type": "boolean"}, text, {"type": "array", "items": text}]}
        case Storage():
            return {"anyOf": [{"enum": list(KINDS_OF_STORAGE)}, {"type": "string", "pattern": r"[/\\]|\$\{"}]}
        case Attempts():
            pause = _of_kind(Seconds(True))
            table = {"max_attempts": _of_kind(Whole()), "initial_delay": pause, "max_delay": pause}
            return {
                "anyOf": [
                    {"type": "integer", "minimum": 1},
                    {"type": "object", "properties": table, "additionalProperties": False},
                ]
            }
        case EngineAt():
            text = {"type": "string", "pattern": r"^(rediss?|unix)://|\$\{"}
            return {"anyOf": [text, {**_object(ENGINE, ENGINE, Engine), "required": ["url"]}]}
        case Location() | Secret():
            return {"type": "string", "pattern": r"\S"}
        case _:
            return {"type": "string"}
