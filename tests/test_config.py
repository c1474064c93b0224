"""Configuration: towerman.toml, TOWERMAN_* variables, rules for tools by pattern, and the JSON schema of the file.

Theory. There are four places for an option; the first that gives it counts. A file is looked at as a whole before
anything comes of it, and every mistake in it is told with its file, its key and what is allowed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from towerman import BatchResult, Budget, Call, PolicyError, Pool, Tower
from towerman.config import (
    FILE_VARIABLE,
    MAX_FILE_BYTES,
    MAX_TOLD,
    TOOL_KEYS,
    TOWER_KEYS,
    Config,
    Rule,
    from_environment,
    laid_out,
    load,
    overlaid,
    rule,
    schema,
)
from towerman.policy import (
    POOL,
    TOOL,
    TOOL_OPTIONS,
    TOWER,
    TOWER_OPTIONS,
    Attempts,
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
    RateLimit,
    Repeats,
    Seconds,
    Secret,
    Shares,
    Spending,
    Storage,
    Templates,
    ToolPolicy,
    Whole,
    Word,
)

EXAMPLE = ROOT / "docs" / "towerman.example.toml"
SCHEMA = jsonschema_rs.validator_for(schema())
UNSET = {"engine", "journal", "secret"}
"""Options of a tower that are not there unless they are given."""
SECRET = "S3CRET-of-the-environment"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine's own environment says is no part of a test."""
    for name in [*from_names(), FILE_VARIABLE]:
        monkeypatch.delenv(name, raising=False)


def from_names() -> list[str]:
    """The variables that give options."""
    return [f"TOWERMAN_{key.upper()}" for key in TOWER_KEYS]


def refusal(source: Any, environ: Mapping[str, str] | None = None) -> str:
    """What is said about a configuration that is wrong."""
    with pytest.raises(PolicyError) as told:
        load(source, {} if environ is None else environ)
    return str(told.value)


def file(folder: Path, text: str) -> str:
    """A towerman.toml with this text."""
    path = folder / "towerman.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def policy(tower: Tower, name: str = "crm_read", **options: Any) -> ToolPolicy:
    """The policy of a tool that is declared with these options."""

    async def handler(key: int = 1) -> int:
        for _ in range(3):
            await asyncio.sleep(0)
        return key

    tower.add_tool(handler, name=name, **options)
    return tower._core.tools[name].policy


# ==================================================================== the tables


def test_the_tables_name_every_option_once() -> None:
    """One place for each option: every field of a policy stands in the table that checks it, reads it and describes
    it, and nothing else does.
    """
    assert {*TOWER, "pools", "budgets"} == set(TOWER_OPTIONS)
    assert set(TOOL) == set(TOOL_OPTIONS) - {"name"} | {"preset"}
    assert set(POOL) == {field.name for field in dataclasses.fields(Pool)}
    assert set(TOOL) - set(TOOL_KEYS) == {"encode", "merge", "still_valid", "summarize"}
    assert set(TOWER) - set(TOWER_KEYS) == {"count_tokens"}
    assert all(option.says and option.kind.allowed for table in (TOWER, POOL, TOOL) for option in table.values())


def test_the_signature_shows_the_defaults() -> None:
    """API section 1: `config` is the first parameter and the only positional one, and the signature shows the
    defaults that hold where no place gives an option.
    """
    parameters = inspect.signature(Tower).parameters
    assert [name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY] == ["config"]
    shown = {name: one.default for name, one in parameters.items() if name in TOWER}
    made = Tower().options
    assert shown == {name: getattr(made, name) for name in TOWER}


# ==================================================================== the file


def test_a_file_gives_options_pools_and_rules(tmp_path: Path) -> None:
    """API section 6: options of the tower, pools, and options of tools by name and pattern come out of a file."""
    path = file(
        tmp_path,
        'max_concurrency = 4\ntimeout = 7\nmode = "observe"\n[pools]\nmail = 1\n[pools.crm]\npermits = 2\n'
        'scope = "tenant"\nreserve = 1\nmax_queued = 0\n[tools."crm_*"]\npools = ["crm"]\n',
    )
    tower = Tower(path)
    assert (tower.options.max_concurrency, tower.options.timeout, tower.options.mode) == (4, 7.0, "observe")
    assert tower.options.pools == {"mail": Pool(1), "crm": Pool(2, max_queued=0, scope="tenant", reserve=1)}
    assert policy(tower).pools == (("crm", 1),)
    assert tower.config == path


def test_a_path_a_text_and_a_mapping_say_the_same(tmp_path: Path) -> None:
    """API section 1: `config` is a path (text or Path) or a mapping; a configuration is frozen and compares by what it
    says, not by the name of its file.
    """
    path = file(tmp_path, '\ufeff[pools.crm]\r\npermits = 2\r\n[tools.x]\r\nreads = ["a:{k}", "b"]\r\n')
    table = {"pools": {"crm": {"permits": 2}}, "tools": {"x": {"reads": ["a:{k}", "b"]}}}
    one, two, three = load(path), load(Path(path)), load(table)
    assert one == two == three
    assert one != load({**table, "grace": 1})
    assert load({"tools": {"x": {"timeout": 1}}}) != load({"tools": {"x": {"timeout": 2}}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.path = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        one.options["grace"] = 1  # type: ignore[index]
    table["pools"]["crm"]["permits"] = 3
    assert three.pools["crm"].permits == 2
    assert repr(three) == "Config(a mapping: 0 options, 1 pools, 1 tools)"
    assert repr(one).startswith("Config('")
    assert repr(one.tools) == "(Rule('x', reads),)"
    assert Tower(one).options == Tower(three).options
    assert Tower(table).config is None


def test_the_example_file_shows_every_default(tmp_path: Path) -> None:
    """The example in the docs names every option of a tower with its default, every option of a pool, and fits its
    schema.
    """
    table = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    SCHEMA.validate(table)
    made = load(EXAMPLE, {})
    assert set(made.options) == set(TOWER_KEYS) - UNSET
    assert made.options == {key: getattr(Tower().options, key) for key in set(TOWER_KEYS) - UNSET}
    assert all(f"\n# {key} = " in EXAMPLE.read_text(encoding="utf-8") for key in UNSET)
    assert set(table["pools"]["crm"]) == set(POOL)
    tower = Tower(EXAMPLE)
    assert policy(tower, "crm_read_one", reads="customer:{key}").timeout == 10
    assert policy(tower, "crm_read_two").max_wait == 10.0  # the preset of the more specific rule
    assert policy(tower, "crm_write").max_wait == 5


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_concurency": 3}, "config: max_concurency: no such key; did you mean 'max_concurrency'?"),
    ({"tools": {"x": {"requires_approval": 1}}}, "config: tools.x.requires_approval: true or false; got 1"),
    (
        {"tools": {"x": {"still_valid": "f"}}},
        "config: tools.x.still_valid: a function, which a file cannot hold",
    ),
    ({"zzz": 3}, "config: zzz: no such key; known: approval_lifetime, budgets, debug, engine, grace, "),
    ({"engine": {"group": "a"}}, "config: engine: url is missing: "),
    (
        {"engine": {"url": "redis://h", "lease": 0}},
        "config: engine.lease: seconds, more than 0; got 0",
    ),
    ({"engine": {"url": "redis://h", "lese": 1}}, "config: engine.lese: no such key; did you mean 'lease'?"),
    ({"max_concurrency": 0}, "config: max_concurrency: a whole number, 1 or more; got 0"),
    ({"max_concurrency": 2.0}, "config: max_concurrency: a whole number, 1 or more; got 2.0"),
    ({"max_concurrency": "2"}, "config: max_concurrency: a whole number, 1 or more; got '2'"),
    ({"timeout": float("inf")}, "config: timeout: a finite number of seconds; got inf"),
    ({"grace": -1}, "config: grace: seconds, 0 or more; got -1"),
    ({"strict": 1}, "config: strict: true or false; got 1"),
    ({"on_excess": "quue"}, "config: on_excess: one of 'tell', 'queue' (did you mean 'queue'?); got 'quue'"),
    ({"pools": 3}, "config: pools: tables such as [pools.crm], with permits; got 3"),
    ({"pools": {"crm": 0}}, "config: pools.crm: a whole number, 1 or more; got 0"),
    ({"pools": {"crm": {"permits": True}}}, "config: pools.crm.permits: a whole number, 1 or more; got True"),
    ({"pools": {"crm": {}}}, "config: pools.crm: permits is missing: a whole number, 1 or more"),
    (
        {"pools": {"crm": {"permits": 1, "size": 1}}},
        "config: pools.crm.size: no such key; known: breaker, max_queued, permits",
    ),
    ({"pools": {"crm": {"permits": 1, "scope": "runs"}}}, "config: pools.crm.scope: one of 'process', 'run', 'tenant'"),
    ({"pools": {"crm": {"permits": 1, "reserve": 1}}}, "config: pools.crm.reserve: below permits (1)"),
    ({"pools": {"run": 1}}, "config: pools.run: this name is taken by Towerman's own limit"),
    ({"pools": {"a b": 1}}, "config: pools: 1 to 128 letters, digits, '_', '-' or '.'; got 'a b'"),
    ({"budgets": 3}, "config: budgets: tables such as [budgets.run], with calls or tokens; got 3"),
    ({"budgets": {"run": 20}}, "config: budgets.run: a table such as {calls = 20, seconds = 60}; got 20"),
    ({"budgets": {"runs": {"calls": 1}}}, "or 'tenant:NAME' (did you mean 'run'?); got 'runs'"),
    ({"budgets": {"tenant:a b": {"calls": 1}}}, "config: budgets: the name of a tenant: 1 to 128 letters"),
    ({"budgets": {"run": {}}}, "config: budgets.run: it limits nothing; give calls=, seconds=, tokens=, cost= or"),
    ({"budgets": {"run": {"per": "day"}}}, "config: budgets.run: it limits nothing"),
    ({"budgets": {"run": {"call": 1}}}, "config: budgets.run: no unit 'call'; did you mean 'calls'?"),
    ({"budgets": {"run": {"calls": -1}}}, "config: budgets.run.calls: a number, 0 or more; got -1"),
    ({"budgets": {"run": {"calls": True}}}, "config: budgets.run.calls: a number, 0 or more; got True"),
    ({"budgets": {"run": {"calls": 1, "per": "year"}}}, "config: budgets.run.per: one of 'second', 'minute', 'hour',"),
    ({"budgets": {"run": {"calls": 1, "per": 0}}}, "config: budgets.run.per: seconds, more than 0; got 0"),
    ({"budgets": {"run": {"calls": 1, "partial": "no"}}}, "config: budgets.run.partial: True or False; got 'no'"),
    ({"budgets": {"run": {"seconds": 0}}}, "config: budgets.run.seconds: seconds, more than 0; got 0"),
    ({"budgets": {"tenant": {"seconds": 1}}}, "config: budgets.tenant: seconds count from the beginning of a run"),
    ({"budgets": {"batch": {"calls": 1, "per": "day"}}}, "config: budgets.batch: per: a batch has its budget once"),
    ({"max_repeats": 0}, 'config: max_repeats: a whole number, 1 or more, or "any"; got 0'),
    ({"max_repeats": "all"}, "config: max_repeats: a whole number, 1 or more, or \"any\"; got 'all'"),
    ({"tools": {"x": {"spends": -1}}}, "config: tools.x.spends: a number of calls, or units with their amounts"),
    ({"tools": {"x": {"spends": {"cost": "1"}}}}, "config: tools.x.spends: cost: a number, 0 or more; got '1'"),
    ({"tools": {"x": {"spends": {"seconds": 1}}}}, "config: tools.x.spends: seconds pass by themselves"),
    ({"tools": {"x": {"max_repeats": 1.5}}}, "config: tools.x.max_repeats: a whole number, 1 or more, or"),
    ({"tools": []}, 'config: tools: tables such as [tools."crm_*"]; got list'),
    ({"tools": {"a b": {}}}, 'config: tools."a b": a tool\'s name or a pattern'),
    ({"tools": {'a"\\': {}}}, 'config: tools."a\\"\\\\": a tool\'s name or a pattern'),
    ({"tools": {"a\n": {}}}, "config: tools.'a\\n': a tool's name or a pattern"),
    ({"tools": {"x": 3}}, "config: tools.x: a table of options; got 3"),
    ({"tools": {"crm_*": {"read": "k"}}}, "config: tools.\"crm_*\".read: no such key; did you mean 'reads'?"),
    ({"tools": {"x": {"encode": "f"}}}, "config: tools.x.encode: a function, which a file cannot hold; give it where"),
    ({"tools": {"x": {"merge": "f"}}}, "config: tools.x.merge: a function, which a file cannot hold; give it where"),
    ({"placeholder_guard": "on"}, "config: placeholder_guard: one of 'refuse', 'warn', 'off'; got 'on'"),
    ({"tools": {"x": {"free_text": 5}}}, "config: tools.x.free_text: True for all arguments, a name such as 'body'"),
    ({"tools": {"x": {"share_identical": "yes"}}}, "config: tools.x.share_identical: true or false; got 'yes'"),
    ({"tools": {"x": {"name": "f"}}}, "config: tools.x.name: no such key"),
    ({"tools": {"crm": {"read": {"timeout": 1}}}}, 'a name with a dot in it is quoted: [tools."crm.read"]'),
    (
        {"tools": {"x": {"reads": 3}}},
        "config: tools.x.reads: a template such as 'ticket:{id}', or a list of them; got 3",
    ),
    (
        {"tools": {"x": {"reads": []}}},
        "config: tools.x.reads: a template such as 'ticket:{id}', or a list of them; it is",
    ),
    ({"tools": {"x": {"writes": ["k", " "]}}}, "or holds an empty one"),
    ({"tools": {"x": {"writes": ["k", 3]}}}, "or a list of them; it holds 3"),
    ({"tools": {"x": {"pools": 3}}}, "config: tools.x.pools: a list of pool names or a mapping of name to permits"),
    ({"tools": {"x": {"pools": ["a", 3]}}}, "mapping of name to permits; it holds 3"),
    ({"tools": {"x": {"pools": {"a": 0}}}}, "config: tools.x.pools.a: a whole number, 1 or more; got 0"),
    ({"tools": {"x": {"preset": "writing"}}}, "config: tools.x.preset: one of 'read', 'write', 'background'"),
    ({"tools": {"x": {"description": 3}}}, "config: tools.x.description: text; got 3"),
    ({"tools": {"x": {"independent": True, "reads": "k"}}}, "config: tools.x: independent=True contradicts reads"),
]
ONLY_HERE = (
    "max_concurrency: a whole number, 1 or more; got 2.0",
    "below permits",
    "contradicts",
    "no unit 'call'",
    "seconds count from",
    "a batch has its budget once",
)
"""Mistakes that no JSON schema of ours tells: 2.0 is an integer there, one key does not know of another, and a unit may
have any name.
"""


@pytest.mark.parametrize(("table", "told"), WRONG, ids=[told[:60] for _, told in WRONG])
def test_every_mistake_names_its_key_and_what_is_allowed(table: dict[str, Any], told: str) -> None:
    """API section 6, DESIGN style 7: a mistake is told with its path of keys, what is allowed and the nearest right
    key; the schema for editors refuses it too.
    """
    assert told in refusal(table)
    assert SCHEMA.is_valid(table) == any(part in told for part in ONLY_HERE)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """API section 6: a file is looked at as a whole: every mistake in it is told, up to a bound."""
    path = file(tmp_path, 'timeout = 0\nmode = "watch"\n[pools.crm]\npermit = 2\n')
    told = refusal(path).splitlines()
    assert told[0] == f"{path}: 4 mistakes:"
    assert [line.split(":")[0] for line in told[1:]] == ["- timeout", "- mode", "- pools.crm.permit", "- pools.crm"]
    many = refusal({f"key{number}": 1 for number in range(30)}).splitlines()
    assert (many[0], many[-1]) == ("config: 30 mistakes:", f"- and {30 - MAX_TOLD} more")
    assert len(many) == MAX_TOLD + 2


def test_keys_that_are_no_text() -> None:
    """A mapping by something else than names is refused in words."""
    assert refusal({3: 1}) == "config: a key of type int; keys are text"
    assert refusal({"pools": {"a": {3: 1, "permits": 1}}}) == "config: pools.a: a key of type int; keys are text"
    assert "pools: 1 to 128 letters" in refusal({"pools": {3: 1}})
    assert "tools.int: a tool's name or a pattern" in refusal({"tools": {3: {}}})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a = 1\nb = = 2\n", ", line 2, column 5: "),
        ("[pools.crm\n", ", line 1, column 11: "),
        ('a = """x\ny', ", line 2, column 2: Unterminated string at the end of the file"),
        ("a", "line 1, column 2: "),
        ("a = 1\na = 2\n", ", line 2, column 6: "),
        (f"a = {'[' * 100_000}", ": a value in it is too deep or has too many digits to be read"),
        (f"a = {'9' * 5_000}", ": a value in it is too deep or has too many digits to be read"),
        (f"# {'x' * MAX_FILE_BYTES}", ": larger than 1,000,000 bytes"),
    ],
    ids=["value", "table", "end", "no value", "twice", "deep", "long", "large"],
)
def test_mistakes_of_syntax_name_line_and_column(text: str, told: str, tmp_path: Path) -> None:
    """API section 6: what is no TOML is told with its file, line and column, never as an error of Python's own."""
    path = file(tmp_path, text)
    assert refusal(path).startswith(path)
    assert told in refusal(path)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not there, is a folder, is not text, or has no name is told by its name."""
    monkeypatch.chdir(tmp_path)
    assert refusal("no.toml") == "config 'no.toml': there is no such file"
    assert refusal(tmp_path).startswith(f"config '{tmp_path}': cannot be read: ")
    assert refusal("a\0b") == "config \"'a\\\\x00b'\": this is no file name"
    assert refusal("x" * 5000).startswith(f"config '...{'x' * 197}': cannot be read: ")
    (tmp_path / "bytes.toml").write_bytes(b'a = 1\nb = "\xff"\n')
    assert refusal("bytes.toml") == "bytes.toml, line 2, column 6: not UTF-8 text"
    assert refusal(b"towerman.toml").startswith("config: the path of a towerman.toml, or a mapping of its keys; got")
    assert refusal(3).startswith("config: the path of a towerman.toml")

    class Bytes:
        def __fspath__(self) -> bytes:
            return b"x"

    assert refusal(Bytes()) == "config: a path is text; got bytes"


# ==================================================================== ${NAME}


def test_variables_in_texts() -> None:
    """API section 6: `${NAME}` in a text stands for a variable of the environment, also inside a list, and `$${` for
    itself.
    """
    environ = {"MODE": "observe", "ROOT": "srv", "CRM": "crm", "EMPTY": ""}
    table = {
        "mode": "${MODE}",
        "pools": {"crm": 1},
        "tools": {
            "crm_read": {
                "reads": ["file:${ROOT}/${ROOT}${EMPTY}/{key}", "b"],
                "description": "costs $${key} or $5",
                "pools": ["${CRM}"],
            }
        },
    }
    tower = Tower(load(table, environ))
    assert tower.options.mode == "observe"
    made = policy(tower)
    assert made.reads == ("file:srv/srv/{key}", "b")
    assert made.description == "costs ${key} or $5"
    assert made.pools == (("crm", 1),)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("${NO}", "config: mode: the environment has no variable NO; set it, or leave the key out"),
        ("a ${} b", "config: mode: '${' begins a variable such as ${NAME}; write '$${' for '${' itself"),
        ("${1a}", "begins a variable"),
        ("${A", "begins a variable"),
        ("${A{B}}", "begins a variable"),
    ],
)
def test_variables_that_are_missing_or_no_names(text: str, told: str) -> None:
    """A missing variable is an error that names file, key and variable; so is a `${` that begins none."""
    assert told in refusal({"mode": text}, {"A": "enforce"})


def test_g8_values_of_variables_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    """G8: what a variable holds is in no message, no repr and no trace, whatever is wrong and wherever it stands."""
    environ = {"V": SECRET, "BRACE": f"{SECRET}{{", "BLANK": f" {SECRET}", "X": "1"}
    texts: list[str] = []
    for table in (
        {"mode": "${V}"},
        {"on_excess": "tell${V}"},
        {"max_concurrency": "${V}"},
        {"timeout": "${V}"},
        {"strict": "${V}"},
        {"pools": {"a": {"permits": "${V}"}}},
        {"pools": "${V}"},
        {"tools": "${V}"},
        {"tools": {"x": "${V}"}},
        {"tools": {"x": {"preset": "${V}", "pools": {"a": "${V}"}, "reads": ["${V}", 3]}}},
    ):
        texts.append(refusal(table, environ))
    for table in (
        {"tools": {"crm_read": {"pools": ["${V}"]}}},
        {"tools": {"crm_read": {"reads": "file:${V}/{kye}"}}},
        {"tools": {"crm_read": {"reads": "file:${BRACE}/{key}"}}},
        {"tools": {"crm_read": {"writes": "${BLANK}"}}},
    ):
        with pytest.raises(PolicyError) as told:
            policy(Tower(load(table, environ)))
        texts.append(str(told.value))
    assert "no parameter of the tool; did you mean 'key'" in texts[-3]
    assert "with the values of BRACE, which are not shown" in texts[-2]
    assert texts[-2].endswith("reads is given in config: tools.crm_read")
    config = load({"tools": {"*": {"writes": "k${X}:${V}/{key}", "description": "${V}"}}}, environ)
    tower = Tower(config, run_concurrency=4)
    events: list[object] = []
    tower.add_observer(events.append)
    made = policy(tower)
    batches = asyncio.run(two_at_once(tower))
    tower.flush()
    [blocked] = [batch for batch in batches if batch[0].waited_for]
    assert blocked[0].waited_for == ("resource k${X}:${V}/{key}",)
    texts += [repr(config), repr(config.tools), repr(made), repr(tower.options), repr(events)]
    texts += [text for batch in batches for text in (repr(list(batch)), batch.timeline(), json.dumps(batch.messages()))]
    texts += [repr(dict(config.tools[0].options)), caplog.text]
    assert not [text for text in texts if SECRET in text]
    tower.close()


async def two_at_once(tower: Tower) -> list[BatchResult]:
    """Two runs that want the same resource: one of them waits for it."""
    return list(await asyncio.gather(*(tower.execute([Call("crm_read", {"key": 1})]) for _ in range(2))))


# ==================================================================== the environment, and who wins


def test_argument_environment_file_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """API section 1: argument, then TOWERMAN_* environment, then file, then default; also an argument that equals the
    default wins.
    """
    table = {"max_concurrency": 5, "run_concurrency": 6, "grace": 7}
    monkeypatch.setenv("TOWERMAN_MAX_CONCURRENCY", "50")
    monkeypatch.setenv("TOWERMAN_RUN_CONCURRENCY", " 60 ")
    monkeypatch.setenv("TOWERMAN_TIMEOUT", "")
    made = Tower(table, max_concurrency=32).options
    assert (made.max_concurrency, made.run_concurrency, made.grace, made.timeout) == (32, 60, 7.0, 300.0)
    monkeypatch.delenv("TOWERMAN_MAX_CONCURRENCY")
    assert Tower(table).options.max_concurrency == 5
    assert Tower(config=table, max_concurrency=32).options.max_concurrency == 32


def test_pools_of_the_code_win_one_by_one() -> None:
    """API section 1: a pool that is an argument wins over the file's of that name; the file's others stay."""
    table = {"pools": {"a": 1, "b": {"permits": 2, "reserve": 1}}}
    assert Tower(table, pools={"b": 3, "c": 4}).options.pools == {"a": Pool(1), "b": Pool(3), "c": Pool(4)}
    assert Tower(table, pools=None).options.pools == {"a": Pool(1), "b": Pool(2, reserve=1)}


def test_a_subclass_gives_arguments_too() -> None:
    """What a subclass hands on is an argument like any other."""

    class Mine(Tower):
        def __init__(self, width: int) -> None:
            super().__init__({"max_concurrency": 3, "grace": 1}, max_concurrency=width)

    assert (Mine(32).options.max_concurrency, Mine(32).options.grace) == (32, 1.0)
    with pytest.raises(TypeError, match="max_concurency"):
        Tower(max_concurency=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Tower(None, 3)  # type: ignore[misc]


@pytest.mark.parametrize("key", TOWER_KEYS)
def test_every_scalar_option_has_a_variable(key: str) -> None:
    """API section 1: each option of a tower that is one value can be given by the environment, and a wrong one names
    the variable and what is allowed, not the value.
    """
    name, kind = f"TOWERMAN_{key.upper()}", TOWER[key].kind
    right = {Whole: ("100", 100), Seconds: ("2.5", 2.5), Flag: ("True", True), Repeats: ("7", 7)}
    right |= {Storage: ("./x", "./x")}
    text, value = right.get(type(kind), ("", None))
    if key == "engine":
        made = from_environment({name: "redis://:S3CRET@host/0"})
        assert made["engine"] == Engine("redis://:S3CRET@host/0") and "S3CRET" not in repr(made)
        with pytest.raises(PolicyError) as told:
            from_environment({name: "S3CRET"})
        assert name in str(told.value) and "S3CRET" not in str(told.value)
        return
    if key in UNSET:
        assert from_environment({name: "any text"}) == {key: "any text"}
        assert "any text" not in repr(from_environment({name: "any text"}))
        assert from_environment({name: ""}) == {}
        return
    if isinstance(kind, Word):
        text = value = kind.words[-1]
    assert from_environment({name: text, "OTHER": "x"}) == {key: value}
    for wrong in ("S3CRET", "-5", "1e400", "9" * 30, "nan"):
        with pytest.raises(PolicyError) as told:
            from_environment({name: wrong})
        allowed = "true or false" if isinstance(kind, Flag) else kind.allowed
        assert str(told.value) == f"{name}, in the environment: {allowed}; its value is not shown"
    assert from_environment({name: ""}) == {}


@pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("0", False), ("false", False)])
def test_flags_in_the_environment(text: str, value: bool) -> None:
    """A flag is true, false, 1 or 0."""
    assert from_environment({"TOWERMAN_STRICT": text}) == {"strict": value}


def test_a_variable_that_is_nearly_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt variable is not passed over in silence; one of somebody else's is left alone."""
    with caplog.at_level(logging.WARNING, "towerman"):
        assert from_environment({"TOWERMAN_MAX_CONCURENCY": SECRET, "TOWERMAN_LONG": "1", FILE_VARIABLE: "x"}) == {}
    assert [one.getMessage() for one in caplog.records] == [
        "the environment variable TOWERMAN_MAX_CONCURENCY is none of Towerman's; did you mean TOWERMAN_MAX_CONCURRENCY?"
    ]


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower that is made without a file reads the one that TOWERMAN_CONFIG names; `config=` wins over it."""
    monkeypatch.setenv(FILE_VARIABLE, file(tmp_path, "max_concurrency = 3\n"))
    assert Tower().options.max_concurrency == 3
    assert Tower({}).options.max_concurrency == 32
    monkeypatch.setenv(FILE_VARIABLE, "no.toml")
    with pytest.raises(PolicyError, match=r"config 'no.toml': there is no such file"):
        Tower()
    monkeypatch.setenv(FILE_VARIABLE, "")
    assert Tower().options.max_concurrency == 32


# ==================================================================== rules for tools


ACCESS: list[dict[str, object]] = [
    *({key: value} for key in ("independent", "sequential") for value in (True, False)),
    *({"reads": "a"}, {"writes": "b"}, {"reads": "c", "writes": "d"}),
]

RULES = st.builds(
    lambda pattern, options: Rule(pattern, options, "here"),
    st.sampled_from(("crm_*", "*_read", "crm_read", "crm_[rw]*")),
    st.dictionaries(st.sampled_from(("timeout", "max_wait", "weight")), st.integers(1, 9), max_size=2).flatmap(
        lambda numbers: st.sampled_from(
            [{}, *ACCESS],
        ).map(lambda access: {**numbers, **access})
    ),
)


@given(st.lists(st.lists(RULES, max_size=3), max_size=8), st.sampled_from(("crm_read", "crm_write", "to_read")))
def test_rules_that_are_given_again_and_again_say_the_same_and_do_not_grow(turns: list[list[Rule]], name: str) -> None:
    layer: tuple[Rule, ...] = ()
    for later in turns:
        layer = overlaid(layer, later)
    every = [one for later in turns for one in later]
    own = {"timeout": 3}
    assert laid_out(name, own, layer)[0] == laid_out(name, own, every)[0]
    assert len(layer) <= 4 * 7, "each kept rule has an option that no later one of its pattern gives"


def test_a_tower_that_is_changed_without_end_does_not_grow() -> None:
    """A change costs as much after thousands of others as after none."""
    tower = Tower(pools={"small": 2})
    tower.add_tool(lambda: None, name="quick", independent=True, max_concurrency=2)
    for turn in range(200):
        tower.configure(pools={"small": 1 + turn % 3}, tools={"quick": {"max_concurrency": 1 + turn % 5}})
        tower.policy("qu*", timeout=1 + turn)
    assert len(tower._layers.rules) == 2


def test_the_most_specific_rule_wins_for_each_option() -> None:
    """API section 6: an exact name before a pattern, then more literal characters, then the later one; each option by
    itself.
    """
    tower = Tower(
        {
            "tools": {
                "crm_read": {"timeout": 1},
                "*": {"timeout": 5, "max_wait": 5, "max_queued": 5, "weight": 5, "max_concurrency": 5},
                "crm_*": {"timeout": 2, "max_wait": 2, "max_queued": 2, "weight": 2},
                "crm_?ead": {"timeout": 3, "max_wait": 3},
                "crm_[pqr]ea?": {"timeout": 4, "max_wait": 4, "max_queued": 4},
            }
        }
    )
    made = policy(tower)
    assert (made.timeout, made.max_wait, made.max_queued, made.weight, made.max_concurrency) == (1, 3, 4, 2, 5)
    assert policy(tower, "other").weight == 5
    assert policy(Tower({"tools": {"c*": {"timeout": 1}, "*d": {"timeout": 2}}})).timeout == 2
    assert policy(Tower({"tools": {"*d": {"timeout": 1}, "c*": {"timeout": 2}}})).timeout == 2
    assert policy(Tower({"tools": {"CRM_*": {"timeout": 1}}})).timeout is None


def test_tool_then_policy_then_file() -> None:
    """What is given at the tool wins over `tower.policy`, which wins over the file, however specific that is; None at
    the tool is not given.
    """
    tower = Tower({"tools": {"crm_read": {"timeout": 1, "max_wait": 1, "weight": 3}}})
    tower.policy("crm_*", timeout=2, max_wait=2)
    made = policy(tower, timeout=3, max_wait=None, weight=None)
    assert (made.timeout, made.max_wait, made.weight) == (3, 2, 3)


def test_policy_holds_for_tools_before_and_after() -> None:
    """API section 1: `tower.policy` reaches tools that are declared already, their own limits and order included."""
    tower = Tower(pools={"crm": 2})
    assert policy(tower, max_concurrency=3).pools == ()
    assert policy(tower, "crm_free", max_concurrency=1).weight == 1
    other = policy(tower, "other")
    tower.policy("crm_*", pools=["crm"], sequential=True, max_concurrency=2)
    tower.policy("crm_*", max_concurrency=1)
    first, later = tower._core.tools["crm_read"].policy, policy(tower, "crm_write")
    assert (first.pools, first.sequential, first.max_concurrency) == ((("crm", 1),), True, 3)
    assert (later.pools, later.sequential, later.max_concurrency) == ((("crm", 1),), True, 1)
    assert tower._core.tools["other"].policy == other
    assert tower.tools == ("crm_read", "crm_free", "other", "crm_write")
    assert tower.statistics().pools["tool:crm_write"].limit == 1
    tower.policy("other", max_concurrency=4)
    assert tower.statistics().pools["tool:other"].limit == 4
    tower.policy("other", max_concurrency=2)
    assert tower.statistics().pools["tool:other"].limit == 2
    assert all(batch.ok for batch in asyncio.run(two_at_once(tower)))
    tower.validate()
    tower.close()


def test_policy_changes_no_tool_that_may_be_at_work() -> None:
    """G3, G4: while calls are at work, `tower.policy` does not change what a declared tool touches: it is refused, and
    nothing of it is taken; other options are, and so is what is said of tools to come.
    """
    tower = Tower()
    policy(tower)

    @tower.tool
    async def other() -> None:
        with pytest.raises(PolicyError, match=r"policy 'crm_\*': it changes what 'crm_read' touches, and calls are at"):
            tower.policy("crm_*", timeout=9, writes="k")
        assert tower._core.tools["crm_read"].policy.timeout is None
        tower.policy("crm_*", timeout=1)
        tower.policy("new_*", timeout=2, sequential=True)

    async def go() -> None:
        async with tower.run() as run:
            assert (await run.execute([Call("other", {})])).ok
            tower.policy("crm_*", writes="k")  # nothing is at work now

    asyncio.run(go())
    assert policy(tower, "new_one").sequential
    assert policy(tower, "crm_new").timeout == 1
    assert tower._core.tools["crm_read"].policy.writes == "k"
    assert tower._core.tools["crm_read"].policy.timeout == 1
    tower.close()


@pytest.mark.parametrize(
    ("pattern", "options", "told"),
    [
        (3, {}, "policy: a tool's name or a pattern such as 'crm_*'; got 3"),
        ("a b", {}, "policy: a tool's name or a pattern such as 'crm_*'; got 'a b'"),
        ("crm_*", {"timeuot": 1}, "policy 'crm_*': no option 'timeuot'; did you mean 'timeout'?"),
        ("crm_*", {"name": "x"}, "policy 'crm_*': no option 'name'"),
        ("crm_*", {"timeout": 0}, "policy 'crm_*': timeout: seconds, more than 0; got 0"),
        ("crm_*", {"pools": "crn"}, "tower.policy 'crm_*': no pool 'crn'; did you mean 'crm'?"),
        ("crm_*", {"weight": 33}, "tower.policy 'crm_*': weight 33 is more than the tower's max_concurrency 32"),
        ("crm_*", {"reads": "k:{kye}"}, "reads is given in tower.policy 'crm_*'"),
        ("zzz", {"independent": True, "writes": "k"}, "policy 'zzz': independent=True contradicts"),
    ],
)
def test_a_wrong_policy_changes_nothing(pattern: Any, options: dict[str, Any], told: str) -> None:
    """DESIGN style 7: a wrong rule is refused by its pattern and option, and nothing of it stays."""
    tower = Tower(pools={"crm": 1})
    before = policy(tower)
    with pytest.raises(PolicyError) as caught:
        tower.policy(pattern, **options)
    assert told in str(caught.value)
    assert tower._core.tools["crm_read"].policy == before
    assert policy(tower, "crm_later").timeout is None


def test_what_a_tool_touches_is_one_question() -> None:
    """R-25: a stronger `independent` replaces what a weaker rule says is touched, and the other way round; where it is
    only said that it is not independent, nothing is replaced.
    """
    table = {"tools": {"crm_*": {"reads": "a:{key}", "writes": "b"}, "free_*": {"independent": True}}}
    made = policy(Tower(table), independent=True)
    assert (made.reads, made.writes, made.independent) == (None, None, True)
    made = policy(Tower(table), "free_x", reads="k")
    assert (made.reads, made.independent) == ("k", False)
    assert policy(Tower(table), "free_x", sequential=True).independent is False
    made = policy(Tower(table), writes="c", independent=False)
    assert (made.reads, made.writes) == ("a:{key}", "c")
    with pytest.raises(
        PolicyError, match=r"read_only=True contradicts writes.*writes is given in config: tools\.\"crm_"
    ):
        policy(Tower(table), read_only=True)


def test_presets_are_written_out_where_they_are_given() -> None:
    """R-69, R-71: a preset of a stronger place wins over single options of a weaker one, and loses to a stronger one's
    and to what is given beside it.
    """
    table = {"tools": {"crm_*": {"max_wait": 3, "max_queued": 7}, "bg_*": {"preset": "background", "max_wait": 1}}}
    assert policy(Tower(table), preset="read").max_wait == 10.0
    assert policy(Tower(table), "crm_x", preset="read").max_queued == 7
    assert policy(Tower(table), "bg_x").max_wait == 1
    assert policy(Tower(table), "bg_y", max_queued=2).max_queued == 2
    with pytest.raises(PolicyError, match="tool 'crm_read': preset: one of 'read', 'write', 'background'"):
        policy(Tower(table), preset=["read"])


def test_rules_that_the_tower_could_never_serve_are_refused_when_it_is_made() -> None:
    """R-51: pools that do not exist and weights that do not fit are told with the rule's place, before any tool."""
    table: dict[str, Any] = {"tools": {"crm_*": {"pools": ["crm"]}}}
    with pytest.raises(PolicyError, match=r'^config: tools\."crm_\*": no pool \'crm\'; declare it'):
        Tower(table)
    Tower(table, pools={"crm": 1})
    with pytest.raises(PolicyError, match=r"^config: tools\.x: weight 3 is more than the tower's max_concurrency 2"):
        Tower({"tools": {"x": {"weight": 3}}}, max_concurrency=2)


def test_only_what_comes_from_elsewhere_is_blamed() -> None:
    """A mistake at the tool itself is told as without any rules."""
    tower = Tower({"tools": {"*": {"timeout": 1}}})
    with pytest.raises(PolicyError) as told:
        policy(tower, max_wait=0)
    assert str(told.value) == "tool 'crm_read': max_wait: seconds, more than 0; got 0"


def test_no_rule_no_change() -> None:
    """A tool that no rule speaks of is declared exactly as it was given."""
    given_options = {"reads": "k", "preset": "read"}
    assert laid_out("x", given_options, [rule("y*", {"timeout": 1})]) == (given_options, {})


# ==================================================================== the same by file and by arguments


def values(kind: Kind) -> st.SearchStrategy[Any]:
    """Values that an option may have, as a TOML file has them."""
    match kind:
        case Whole(least):
            return st.integers(least, least + 40)
        case Seconds(zero):
            return st.one_of(st.integers(0 if zero else 1, 99), st.floats(0.001, 1e6))
        case Flag() | Condition():
            return st.booleans()
        case Storage():
            return st.sampled_from(["memory", "off"])
        case Word():
            return st.sampled_from(kind.words)
        case Templates():
            one = st.sampled_from(["a:{key}", "b:{key}/**", "file:x/{key}", "plain"])
            return st.one_of(one, st.lists(one, min_size=1, max_size=3, unique=True))
        case RateLimit():
            number = st.integers(2, 20)
            table = st.fixed_dictionaries(
                {"limit": number},
                optional={"per": st.floats(0.001, 1e6), "burst": number, "reserve": st.integers(0, 1)},
            )
            return st.one_of(st.builds("{}/{}".format, number, st.sampled_from(["s", "3s", "min", "day"])), table)
        case CircuitBreaker():
            number, length = st.integers(1, 9), st.floats(0.001, 1e6)
            numbers = {"failures": number, "probes": number, "window": length, "open_for": length}
            return st.one_of(st.just(True), st.fixed_dictionaries({}, optional=numbers))
        case Spending():
            amounts = st.one_of(st.integers(0, 9), st.floats(0, 1e6))
            units = st.sampled_from(["calls", "tokens", "cost", "mails"])
            return st.one_of(amounts, st.dictionaries(units, amounts, max_size=3))
        case Repeats():
            return st.one_of(st.just("any"), st.integers(1, 9))
        case Shares():
            names = st.sampled_from(["p", "q"])
            several = st.dictionaries(names, st.integers(1, 3), max_size=2)
            return st.one_of(names, st.lists(names, max_size=2, unique=True), several)
        case FreeText():
            names = st.sampled_from(["key", "key.part", "other"])
            return st.one_of(st.booleans(), names, st.lists(names, max_size=2))
        case Attempts():
            most = st.fixed_dictionaries(
                {}, optional={"max_attempts": st.integers(1, 4), "max_delay": st.integers(0, 9)}
            )
            return st.one_of(st.integers(1, 5), most)
        case Location():
            return st.just(":memory:")  # a path is found from the folder of its file
        case EngineAt():
            return st.just("redis://localhost:6379/3")
        case Secret():
            return st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="$"), min_size=1)
        case _:
            return st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="$"), max_size=20)


def table_of(options: Mapping[str, Any], keys: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the options of a table."""
    return st.fixed_dictionaries({}, optional={key: values(options[key].kind) for key in keys})


pool_tables = st.builds(
    lambda permits, more: {"permits": permits, **more},
    st.integers(1, 4),
    table_of(POOL, [key for key in POOL if key not in ("permits", "reserve")]),
)
budget_tables = st.fixed_dictionaries(
    {"calls": st.integers(0, 9)}, optional={"seconds": st.floats(0.001, 1e6), "partial": st.booleans()}
)
money = st.fixed_dictionaries(
    {"cost": st.floats(0, 1e6)}, optional={"per": st.sampled_from(["day", "month", 2.5]), "mails": st.integers(0, 9)}
)
tables = st.fixed_dictionaries(
    {
        "options": table_of(TOWER, TOWER_KEYS),
        "pools": st.fixed_dictionaries({"p": st.integers(1, 4), "q": pool_tables}),
        "budgets": st.fixed_dictionaries({}, optional={"run": budget_tables, "process": money, "tenant:a": money}),
        "tools": st.dictionaries(st.sampled_from(["one", "two"]), table_of(TOOL, TOOL_KEYS)),
    }
)


def toml(value: object) -> str:
    """A value as TOML; the texts here are written as JSON writes them."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def outcome(make: Any) -> object:
    """What comes of it: the tower's options and the policies of two tools, or that it is refused."""
    try:
        tower = make()
    except PolicyError:
        return "refused"
    return tower.options, {name: _comparable(tool.policy) for name, tool in tower._core.tools.items()}


def _comparable(made: ToolPolicy) -> dict[str, object]:
    plain = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}


async def one(key: int = 1) -> int:
    """A tool."""
    return key


@given(table=tables)
def test_a_file_gives_the_same_tower_as_arguments(table: dict[str, Any], tmp_path_factory: Any) -> None:
    """API sections 1 and 6: whatever a valid file says, the tower and its tools are the same as from the same options
    by arguments; the file fits the schema, and what one refuses the other refuses.
    """
    options, pools, tools, budgets = table["options"], table["pools"], table["tools"], table["budgets"]
    path = tmp_path_factory.getbasetemp() / "property.toml"
    path.write_text(
        "".join(
            f"{key} = {toml(one)}\n"
            for key, one in {**options, "pools": pools, "budgets": budgets, "tools": tools}.items()
        )
    )

    def by_file() -> Tower:
        tower = Tower(path)
        for name in ("one", "two"):
            tower.add_tool(one, name=name)
        return tower

    def by_arguments() -> Tower:
        made = {name: Pool(**one) if isinstance(one, dict) else one for name, one in pools.items()}
        tower = Tower(**options, pools=made, budgets={name: Budget(**one) for name, one in budgets.items()})
        for name in ("one", "two"):
            tower.add_tool(one, name=name, **tools.get(name, {}))
        return tower

    assert outcome(by_file) == outcome(by_arguments)
    read = tomllib.loads(path.read_text())
    SCHEMA.validate(read)


junk = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(["wait", "k"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([*TOOL, *POOL, "pools", "tools", "x", "crm_*", "", "run", "calls", "per"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=20,
)


@given(table=st.dictionaries(st.sampled_from([*TOWER, "budgets", "pools", "tools", "x"]), junk, max_size=5))
def test_rubbish_is_refused_in_words_and_what_is_taken_fits_the_schema(table: dict[str, Any]) -> None:
    """API section 6: whatever stands in a file, it is taken or refused by a PolicyError; what is taken fits the schema,
    so that an editor never marks what works.
    """
    try:
        made = load(table, {})
    except PolicyError as refused:
        told = str(refused)
    else:
        told = ""
        assert isinstance(made, Config)
        SCHEMA.validate(json.loads(json.dumps(table)))
    assert not told or told.startswith("config: ")


def test_the_schema_knows_every_key() -> None:
    """The schema is made of the tables: every key with its sentence, and the defaults that hold."""
    made: Any = json.loads(json.dumps(schema()))
    assert set(made["properties"]) == {*TOWER_KEYS, "budgets", "pools", "tools"}
    for key, option in TOWER_KEYS.items():
        assert made["properties"][key]["description"] == option.says
        assert made["properties"][key].get("default") == getattr(Tower().options, key)
        assert ("default" in made["properties"][key]) == (key not in UNSET)
    assert set(made["properties"]["tools"]["additionalProperties"]["properties"]) == set(TOOL_KEYS)
    assert not any(isinstance(TOOL[key].kind, Function) for key in TOOL_KEYS)
    assert "default" not in made["properties"]["tools"]["additionalProperties"]["properties"]["timeout"]
    jsonschema_rs.meta.validate(made)


def test_text_from_the_environment_is_text() -> None:
    """It compares, hashes and is written as the text that it is; only what is shown of it differs."""
    made = FromEnvironment("secret", "${A}${B}${A} $${C}")
    assert made == "secret"
    assert {made: 1}["secret"] == 1
    assert json.dumps(made) == '"secret"'
    assert repr(made) == "'${A}${B}${A} $${C}'"
    assert made.variables == ("A", "B")
