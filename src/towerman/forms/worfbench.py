"""WorFBench's plans: `Node:` lines and `Edges: (START,1) (1,2) (2,END)`.

Theory. Nodes are numbered sentences, and edges say only what comes before what: no data goes along them. A node names
no tool and no arguments, so either one tool is given that gets each sentence as its first argument, or the sentence
is the name of the tool.

House rules. Both headings must be there. A line of the nodes that has no number belongs to the node before it. START
and END are no nodes.

Not here: how a sentence becomes a call of a real tool.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from towerman.calls import Call
from towerman.errors import InputError
from towerman.forms.document import Draft, PlanDocument, number
from towerman.plan import escape_text

FORM: Final = "worfbench"

HEADING: Final = re.compile(r"^[ \t]*(node|graph|edge)s?[ \t]*:", re.IGNORECASE | re.MULTILINE)
_NODE: Final = re.compile(r"[ \t]*(\d{1,18})[ \t]*[.:)](.*)", re.ASCII | re.DOTALL)
_EDGE: Final = re.compile(r"\(\s*(START|\d{1,18})\s*,\s*(END|\d{1,18})\s*\)", re.ASCII)
_BETWEEN: Final = re.compile(r"[\s,]*")


def read(text: str, tool: str | None) -> PlanDocument:
    """Read a plan.

    Args:
        text: as the planner wrote it.
        tool: the tool that gets each node's text as its first argument; None: the text is the tool's name.

    Raises:
        InputError: a line or an edge cannot be read; it says which.
    """
    draft = Draft(FORM, numbered=True)
    nodes: list[tuple[str, list[str]]] = []
    edges: list[tuple[str, int]] = []
    part = ""
    for line, row in enumerate(text.split("\n"), 1):
        heading = HEADING.match(row)
        if heading is not None:
            part = heading[1].lower()
            row = row[heading.end() :]
        if not row.strip():
            continue
        if part == "edge":
            edges.append((row, line))
        elif part == "node":
            node = _NODE.fullmatch(row)
            if node is not None:
                nodes.append((number(node[1]), [node[2].strip()]))
            elif nodes:
                nodes[-1][1].append(row.strip())
            else:
                raise InputError(f"line {line}: a node is written as 1: text")
        elif part == "graph":
            raise InputError(f"line {line}: 'Edges:' is wanted before the edges")
    if not nodes or not edges:
        raise InputError(f"no plan of the form {FORM!r}: numbered lines under 'Node:', and pairs behind 'Edges:'")
    where: dict[str, int] = {}
    for index, (own, rows) in enumerate(nodes):
        where.setdefault(own, index)
        said = "\n".join(rows)
        if not said:
            raise InputError(f"node {own}: its text is missing")
        if tool is None:
            draft.add(Call(said, {}, own))
        else:
            draft.add(Call(tool, {}, own), (escape_text(said),))
    needs: dict[int, dict[str, None]] = {}
    for row, line in edges:
        for source, target in _pairs(row, line):
            if target == "END" or (source == "START" and target in where):
                if target == "END" and source != "START" and source not in where:
                    draft.refuse("bad_reference", f"line {line}: an edge from a node that is not there", len(nodes))
                continue
            if target not in where:
                draft.refuse("bad_reference", f"line {line}: an edge to a node that is not there", len(nodes))
            else:
                needs.setdefault(where[target], {})[source] = None
    for index, wanted in needs.items():
        draft.calls[index] = replace(draft.calls[index], needs=tuple(wanted))
    return draft.finish()


def _pairs(row: str, line: int) -> list[tuple[str, str]]:
    """The edges of one line."""
    found: list[tuple[str, str]] = []
    place = len(row) - len(row.lstrip())
    while place < len(row):
        match = _EDGE.match(row, place)
        if match is None:
            raise InputError(f"line {line}: edges are pairs like (START,1) (1,2) (2,END)")
        found.append(tuple(number(end) if end.isdigit() else end for end in match.groups()))  # type: ignore[arg-type]
        between = _BETWEEN.match(row, match.end())
        place = match.end() if between is None else between.end()
    return found
