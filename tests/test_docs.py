"""The documentation is true: its examples run and print what they say, its links and test names exist.

How a page is read. Its blocks run from top to bottom in one namespace, in a folder of its own.

- ```python            is executed; an ```output block right after it is what it printed, to the character.
- ```python title="x"  is written to the file x instead (so is ```json or ```toml with a title).
- ```console           each line `$ towerman ...` or `$ pytest ...` is run; it must succeed, unless `$ echo $?` and a
                       number follow.
                       Each `$ make ...` must name a target that there is.
- a python block that cannot run stands behind `<!-- no-run: the reason -->`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import test_layers
from conftest import ROOT

import towerman
import towerman.simulate
import towerman.testing

PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.is_file()]
PROSE = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
LANGUAGES = {"python", "output", "console", "json", "text", "toml"}

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL)
INFO = re.compile(r'(?P<language>\w+)(?: title="(?P<title>[^"]+)")?$')
EXCUSE = re.compile(r"<!-- no-run: (?P<reason>[^>]{10,}) -->\s*$")
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
TEST_ID = re.compile(r"`(?P<id>tests/[\w/]+\.py::[\w:]+)`")

pages = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    line: int
    language: str
    title: str | None
    body: str
    excuse: str | None


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page; a fence that is not understood is an error, not something to pass over."""
    found: list[Block] = []
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 1
        info = INFO.match(fence["info"].strip())
        assert info, f"line {line}: say what the block is, as ```python or ```console; got ```{fence['info']}"
        assert info["language"] in LANGUAGES, f"line {line}: ```{info['language']} is none of {sorted(LANGUAGES)}"
        indent = len(fence["indent"])
        body = "".join(row[indent:] if row.strip() else "\n" for row in fence["body"].splitlines(keepends=True))
        excuse = EXCUSE.search(text[: fence.start()])
        found.append(Block(line, info["language"], info["title"], body, excuse["reason"] if excuse else None))
    return found


def plain(text: str) -> str:
    """Printed text without blanks at the ends of lines, which nobody sees."""
    return "\n".join(row.rstrip() for row in text.strip("\n").splitlines())


def run_page(page: Path, folder: Path) -> None:
    """Run a page in a folder; an assertion names the line of the block that is not true."""
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    printed: str | None = None
    for block in blocks(page.read_text(encoding="utf-8")):
        where = f"{page.name}, line {block.line}"
        if block.language == "output":
            assert printed is not None, f"{where}: an output block belongs right after a python block"
            assert plain(printed) == plain(block.body), f"{where}: the example prints something else"
        printed = None
        if block.title is not None:
            (folder / block.title).write_text(block.body, encoding="utf-8")
        elif block.language == "python" and block.excuse is None:
            code = compile("\n" * block.line + block.body, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, namespace)
            printed = out.getvalue()
        elif block.language == "console":
            run_console(block, where, folder)


def run_console(block: Block, where: str, folder: Path) -> None:
    """Run the `towerman` and `pytest` lines of a console block; the exit status is what the page shows, else 0."""
    rows = block.body.splitlines()
    commands = [(number, row[2:]) for number, row in enumerate(rows) if row.startswith("$ ")]
    for (number, command), (_, following) in zip(commands, [*commands[1:], (0, "")], strict=True):
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
            assert set(named) <= set(targets), f"{where}: no such target: {command}"
        elif words[0] in ("towerman", "pytest"):
            expected = int(rows[number + rows[number:].index("$ echo $?") + 1]) if following == "echo $?" else 0
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=folder,
                env={**os.environ, "NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            assert done.returncode == expected, (
                f"{where}: {command}: exit {done.returncode}\n{done.stderr or done.stdout}"
            )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A page's folder: the working folder, and where this process and its children look for modules first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
    before = set(sys.modules)
    yield tmp_path
    # Two pages may both have a file tools.py.
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pages
def test_the_examples_of_a_page_run(page: Path, folder: Path) -> None:
    """What a reader copies works: every example runs, prints what the page says, and exits as it says."""
    run_page(page, folder)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nprint(1 + 1)\n```\n\n```output\n3\n```\n", "prints something else"),
        ("```python\nraise KeyError(5)\n```\n", "KeyError"),
        ("```output\n3\n```\n", "belongs right after"),
        ("```python no-run\nprint(1)\n```\n", "say what the block is"),
        ("```\nprint(1)\n```\n", "say what the block is"),
        ("```py\nprint(1)\n```\n", "is none of"),
        ("<!-- no-run: lazy -->\n```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```console\n$ make nothing\n```\n", "no such target"),
        ("```console\n$ towerman no-such-command\n```\n", "exit 2"),
        (
            '```python title="test_a.py"\ndef test_a():\n    assert 0\n```\n\n```console\n$ pytest test_a.py\n```\n',
            "exit 1",
        ),
    ],
)
def test_a_page_that_is_not_true_is_caught(folder: Path, text: str, complaint: str) -> None:
    """The test of the test: a wrong output, a failing example, an unknown fence and a bare excuse all fail."""
    page = folder / "page.md"
    page.write_text(text)
    with pytest.raises(Exception) as caught:
        run_page(page, folder)
    assert complaint in f"{caught.type.__name__}: {caught.value}"


def test_a_page_that_is_true_passes(folder: Path) -> None:
    """No false alarm: files, outputs, a shown exit status and a stated reason are understood."""
    page = folder / "page.md"
    page.write_text(
        'Text.\n\n```json title="a.json"\n[1, 2]\n```\n\n'
        f"```python\nfrom pathlib import Path\n\nprint(Path({str(folder / 'a.json')!r}).read_text())\n```\n\n"
        "```output\n[1, 2]\n```\n\n"
        "```console\n$ make test\n$ towerman no-such-command\n$ echo $?\n2\n```\n\n"
        "<!-- no-run: needs a key of a provider -->\n```python\n1 / 0\n```\n"
    )
    run_page(page, folder)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the docs builder makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    slugs = (re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", slug) for slug in slugs}


@pytest.mark.parametrize("page", PROSE, ids=[page.name for page in PROSE])
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    """A link inside the project names a file that is there, and a heading that is in it."""
    text = page.read_text(encoding="utf-8")
    broken = []
    for link in LINK.finditer(FENCE.sub("", text)):
        path, _, anchor = link["target"].partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link["target"])
    assert broken == []


def guarantees() -> ModuleType:
    """tools/guarantees.py, which lists the tests on the page of the guarantees."""
    spec = importlib.util.spec_from_file_location("guarantees", ROOT / "tools" / "guarantees.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_named_test_exists() -> None:
    """Every test that a page names exists, read from the test files themselves."""
    tool = guarantees()
    known = {
        f"{path.relative_to(ROOT).as_posix()}::{name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name, _ in tool.tests_of(path)
    }
    named = {match["id"] for page in PROSE for match in TEST_ID.finditer(page.read_text(encoding="utf-8"))}
    assert named
    assert sorted(named - known) == []


def test_every_guarantee_is_explained_and_held_or_said_to_be_absent() -> None:
    """Each of the twelve guarantees has a section, and a test unless the section says that this version has it not."""
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (G\d+) [^\n]+\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [f"G{number}" for number in range(1, 13)]
    held = {f"{kind}{number}" for kind, number in guarantees().collect(ROOT / "tests")}
    bare = [name for name, section in sections.items() if name not in held and "Not in this version" not in section]
    assert bare == []


def test_the_list_of_tests_is_up_to_date() -> None:
    """The page lists the tests as they are; `make guarantees` writes the list anew."""
    tool = guarantees()
    page = tool.PAGE.read_text(encoding="utf-8")
    assert tool.rewritten(page, tool.collect(ROOT / "tests")) == page, "say `make guarantees`"


def test_numbers_are_read_from_names_and_docstrings() -> None:
    """The list is made of what the tests say: numbers in names, in docstrings, and ranges."""
    tool = guarantees()
    assert tool.numbers("test_r48_p05_capacity", "") == {("R", 48), ("P", 5)}
    assert tool.numbers("test_x", "G3, R-48 and S-2.") == {("G", 3), ("R", 48), ("S", 2)}
    assert tool.numbers("test_x", "R-45 to R-47") == {("R", 45), ("R", 46), ("R", 47)}
    assert tool.numbers("test_grow_32", "a GPS3 unit, HTTP2") == set()
    held = {("R", 4): ["tests/test_a.py::test_b"], ("G", 2): ["tests/test_a.py::test_b"]}
    assert "| R-04 | `tests/test_a.py::test_b` |" in tool.tables(held)
    assert "| G2 | `tests/test_a.py::test_b` |" in tool.tables(held)


REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "module", [towerman, towerman.testing, towerman.simulate], ids=["towerman", "towerman.testing", "towerman.simulate"]
)
def test_every_public_name_is_on_the_reference(module: ModuleType) -> None:
    """The reference has each public name: as a directive that shows its docstring, or told in a sentence."""
    shown = set(re.findall(r"^::: ([\w.]+)$", REFERENCE, re.MULTILINE)) | set(
        re.findall(r"`(towerman[\w.]*)`", REFERENCE)
    )
    assert [name for name in module.__all__ if f"{module.__name__}.{name}" not in shown] == []


@pytest.mark.parametrize(
    "module", [towerman, towerman.testing, towerman.simulate], ids=["towerman", "towerman.testing", "towerman.simulate"]
)
def test_public_docstrings_tell_their_arguments(module: ModuleType) -> None:
    """Each public class, method and function has a docstring; one that takes arguments says what each of them is."""
    silent = []
    for name in module.__all__:
        shown = getattr(module, name)
        if not (inspect.isclass(shown) or inspect.isfunction(shown)):
            continue
        members = [(name, shown)]
        foreign = inspect.isclass(shown) and issubclass(shown, asyncio.AbstractEventLoop)  # its interface is asyncio's
        if inspect.isclass(shown) and not foreign:
            public = [(key, value) for key, value in vars(shown).items() if not key.startswith("_")]
            members += [(f"{name}.{key}", getattr(value, "__func__", value)) for key, value in public]
        for path, member in members:
            told = inspect.getdoc(member)
            if isinstance(member, property) or inspect.isclass(member):
                silent += [] if told else [path]
            elif inspect.isfunction(member):
                arguments = [key for key in inspect.signature(member).parameters if key != "self"]
                silent += [f"{path}: {key}" for key in arguments if not re.search(rf"\b{key}: ", told or "")]
                silent += [] if told else [path]
    assert silent == []


def test_every_code_in_use_is_in_the_table() -> None:
    """R-106: a code that a result can have is explained on the reference; what is explained is a code."""
    words = {
        node.value
        for path in (ROOT / "src" / "towerman").rglob("*.py")
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    table = REFERENCE.partition("## Codes")[2].partition("\n## ")[0]
    told = {code for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)}
    assert told == words & towerman.CODES


def test_the_pages_name_the_rooms_in_their_order() -> None:
    """The design page and CONTRIBUTING list the rooms of the layer contract, in its order."""
    rooms = [room for row in test_layers.ROWS for room in row]
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = contributing.partition("A room imports only rooms above it:")[2].partition("\n\n- ")[0]
    assert re.findall(r"`(\w+)`", listed) == rooms
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## The rooms")[2]
    cells = re.findall(r"^\| (`.+?) \|", design, re.MULTILINE)
    assert [room for cell in cells for room in re.findall(r"`(\w+)`", cell)] == rooms
    beside = {*test_layers.SIDES, *test_layers.DOORS} - {"__init__", "__main__"}
    for text in (contributing, design):
        assert beside <= set(re.findall(r"`(\w+)`", text))


def test_every_page_is_in_the_menu() -> None:
    """A newcomer finds each page: the menu names every file, once."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:\n")[2].partition("\n\n")[0]
    named = re.findall(r": ([\w-]+\.md)$", menu, re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("name", ["bfcl_parallel", "bfcl_multi_turn_func_doc/math_api.json"])
def test_the_real_inputs_can_be_read(shared_data, name: str) -> None:
    """The helper that the data tests stand on gives every record of a file."""
    records = shared_data(name)
    assert len(records) > 1
    assert all(json.dumps(record) for record in records)
