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

from towerman.calls import Batch
from towerman.errors import InputError
from towerman.forms.document import Draft, Part, Tools, nothing_known, number

FORM: Final = "worfbench"

HEADING: Final = re.compile(r"^[ \t]*(node|graph|edge)s?[ \t]*:", re.IGNORECASE | re.MULTILINE)
_NODE: Final = re.compile(r"[ \t]*(\d{1,18})[ \t]*[.:)](.*)", re.ASCII | re.DOTALL)
_EDGE: Final = re.compile(r"\s*\(\s*(START|\d{1,18})\s*,\s*(END|\d{1,18})\s*\)\s*,?\s*", re.ASCII)


def read(text: str, tools: Tools, tool: str) -> Batch:
    """Read a plan.

    Args:
        text: as the planner wrote it.
        tools: the parameters of tools.
        tool: the tool that gets each node's text as its first argument; "": the text is the tool's name.

    Raises:
        InputError: a line or an edge cannot be read; it says which.
    """
    draft = Draft(FORM, tools, numbered=True)
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
        if tool:
            draft.add(tool, own, _whole, [said])
        else:
            draft.add(said, own, _whole)
    if not tool and tools is not nothing_known and all(tools(call.tool) is None for call in draft.calls):
        raise InputError(
            f"no node's text is the name of a tool; name the tool that is to get the texts, in the format: {FORM}:TOOL"
        )
    needs: dict[int, dict[str, None]] = {}
    for row, line in edges:
        for source, target in _pairs(row, line):
            for end, none in ((source, "START"), (target, "END")):
                if end != none and end not in where:
                    draft.refuse("bad_reference", f"line {line}: an edge at a node {end}, and there is none", None)
            if source != "START" and target in where:
                needs.setdefault(where[target], {})[source] = None
    for index, wanted in needs.items():
        draft.calls[index] = replace(draft.calls[index], needs=tuple(wanted))
    return draft.finish()


def _pairs(row: str, line: int) -> list[tuple[str, str]]:
    """The edges of one line."""
    found: list[tuple[str, str]] = []
    place = 0
    while place < len(row):
        match = _EDGE.match(row, place)
        if match is None:
            raise InputError(f"line {line}: edges are pairs like (START,1) (1,2) (2,END)")
        source, target = match.groups()
        found.append((number(source), number(target)))
        place = match.end()
    return found


def _whole(text: str) -> list[Part]:
    """A text of this form holds no references."""
    return [text]
