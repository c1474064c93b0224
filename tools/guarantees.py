"""Write into docs/guarantees.md which tests hold which numbered promise.

    python tools/guarantees.py            # write the list anew
    python tools/guarantees.py --check    # only say whether it is up to date

A test holds a number that stands in its name (`test_r48_...`, `test_g3_...`) or in its docstring (`R-48`, `G3`;
`R-45 to R-48` counts for all four).
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guarantees.md"
BEGIN = "<!-- tests: written by `make guarantees` -->\n"
END = "<!-- end of tests -->\n"

KINDS = {"G": "Guarantees", "S": "Rules of order and time", "R": "Requirements", "P": "Reported failures"}

IN_NAME = re.compile(r"(?<=_)([grsp])(\d{1,3})(?=_|$)")
IN_TEXT = re.compile(r"\b([GRSP])-?(\d{1,3})\b(?:\s*(?:to|-|\.\.|\N{EN DASH})\s*\1-?(\d{1,3})\b)?")
WIDEST_RANGE = 30

Number = tuple[str, int]


def numbers(name: str, docstring: str) -> set[Number]:
    """The numbers that a test names."""
    found = {(kind.upper(), int(number)) for kind, number in IN_NAME.findall(name)}
    for kind, first, last in IN_TEXT.findall(docstring):
        end = int(last) if last and 0 <= int(last) - int(first) <= WIDEST_RANGE else int(first)
        found |= {(kind, number) for number in range(int(first), end + 1)}
    return found


def tests_of(path: Path) -> Iterator[tuple[str, str]]:
    """Name and docstring of every test in a file, `Class::test` for methods."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name.startswith("test"):
                    yield f"{node.name}::{method.name}", ast.get_docstring(method) or ""
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            # TestGate = GateMachine.TestCase, as Hypothesis writes a state machine's test
            [target, owner] = [node.targets[0], node.value.value]
            if node.value.attr == "TestCase" and isinstance(target, ast.Name) and isinstance(owner, ast.Name):
                machine = classes.get(owner.id)
                yield target.id, (ast.get_docstring(machine) or "") if machine else ""


def collect(tests: Path) -> dict[Number, list[str]]:
    """Test ids by number."""
    held: defaultdict[Number, list[str]] = defaultdict(list)
    for path in sorted(tests.rglob("test_*.py")):
        for name, docstring in tests_of(path):
            for number in numbers(name, docstring):
                held[number].append(f"{path.relative_to(tests.parent).as_posix()}::{name}")
    return held


def tables(held: dict[Number, list[str]]) -> str:
    """The list as Markdown, one table for each kind of number."""
    parts: list[str] = []
    for kind, title in KINDS.items():
        rows = sorted(number for number in held if number[0] == kind)
        if rows:
            dash = "-" if kind in "RP" else ""
            width = 2 if dash else 1
            lines = [f"### {title}\n", "| number | tests |", "|---|---|"]
            for row in rows:
                ids = "<br>".join(f"`{test}`" for test in held[row])
                lines.append(f"| {kind}{dash}{row[1]:0{width}d} | {ids} |")
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def rewritten(page: str, held: dict[Number, list[str]]) -> str:
    """The page with its list made anew."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{tables(held)}\n{END}{tail}"


def main() -> int:
    """Write the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    new = rewritten(page, collect(ROOT / "tests"))
    if sys.argv[1:] == ["--check"]:
        if new != page:
            print("docs/guarantees.md does not list the tests as they are: say `make guarantees`", file=sys.stderr)
        return int(new != page)
    if sys.argv[1:]:
        print("tools/guarantees.py takes --check or nothing", file=sys.stderr)
        return 2
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
