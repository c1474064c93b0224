"""TaskBench's plans: `{"task_nodes": [{"task": ..., "arguments": ["<node-0>"]}], "task_links": [{"source": ...}]}`.

Theory. Nodes are numbered from 0 in the order of the list. `<node-0>` in an argument is the result of node 0. Links say
by the names of tools what comes before what; they are needs besides those of the references, and may disagree with
them: then both hold, or the plan is a circle. Arguments are values without names, or `{"name": ..., "value": ...}`.

House rules. `<Node_0>` and `<node 0>` can mean only one thing and are read. Anything else in angle brackets that
names a node and a number is refused. A link by the name of a tool that several nodes have could mean each of them:
refused.

Not here: other words for a value that is to come, such as `<generated image>`; the placeholder guard sees them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from towerman.adapters.reading import described, fields_of, items_of, plain_text
from towerman.calls import Batch
from towerman.errors import InputError
from towerman.forms.document import BadText, Draft, Part, Tools, no_path, number

FORM: Final = "taskbench"

_BRACKETS: Final = re.compile(r"<([^<>]*)>")
_NODE: Final = re.compile(r"\s*node[\s_-]*(\d{1,18})\s*", re.IGNORECASE | re.ASCII)
_LIKE_A_NODE: Final = re.compile(r"\bnode[\s_-]*\d", re.IGNORECASE | re.ASCII)


def read(fields: Mapping[str, object], tools: Tools) -> Batch:
    """Read a plan.

    Raises:
        InputError: a part has another type than the form wants; it says which.
    """
    draft = Draft(FORM, tools, ordered=True, numbered=True)
    nodes = items_of(fields.get("task_nodes"))
    if nodes is None:
        raise InputError(f"task_nodes: a list is wanted, got {described(fields.get('task_nodes'))}")
    names: list[str] = []
    for index, item in enumerate(nodes):
        node = fields_of(item)
        tool = None if node is None else node.get("task")
        if node is None or not isinstance(tool, str):
            raise InputError(f"task_nodes[{index}].task: the name of a tool is wanted")
        given, named = _arguments(draft, node.get("arguments"))
        names.append(plain_text(tool))
        draft.add(names[-1], str(index), split, given, named)
    _links(draft, names, fields.get("task_links"))
    return draft.finish()


def _arguments(draft: Draft, arguments: object) -> tuple[list[object], dict[str, object]]:
    """The arguments of the next node: those without names, and those with."""
    if isinstance(arguments, Mapping):
        return [], draft.named(arguments, "arguments")
    items = () if arguments is None else items_of(arguments)
    if items is None:
        draft.refuse("invalid_arguments", f"arguments: a list is wanted, got {described(arguments)}")
        items = ()
    given: list[object] = []
    named: dict[str, object] = {}
    for place, item in enumerate(items, 1):
        if not isinstance(item, Mapping):
            given.append(item)
            continue
        name = item.get("name")
        if item.keys() != {"name", "value"} or not isinstance(name, str):
            told = f"argument {place}: a value, or an object with 'name' and 'value', is wanted"
            draft.refuse("invalid_arguments", told)
        elif name in named:
            draft.refuse("invalid_arguments", f"argument {place}: its name stands twice")
        else:
            named[plain_text(name)] = item["value"]
    return given, named


def _links(draft: Draft, names: Sequence[str], links: object) -> None:
    """What the links say, as needs; `names` are those of the nodes' tools."""
    items = () if links is None else items_of(links)
    if items is None:
        raise InputError(f"task_links: a list is wanted, got {described(links)}")
    where: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        where.setdefault(name, []).append(index)
    needs: dict[int, dict[str, None]] = {}
    for place, item in enumerate(items):
        link = fields_of(item)
        source, target = (None, None) if link is None else (link.get("source"), link.get("target"))
        if not isinstance(source, str) or not isinstance(target, str):
            raise InputError(f"task_links[{place}]: an object with the texts 'source' and 'target' is wanted")
        first = _linked(draft, where, source, f"task_links[{place}].source")
        then = _linked(draft, where, target, f"task_links[{place}].target")
        if first is not None and then is not None:
            needs.setdefault(then, {})[str(first)] = None
    for index, wanted in needs.items():
        draft.calls[index] = replace(draft.calls[index], needs=tuple(wanted))


def _linked(draft: Draft, where: Mapping[str, Sequence[int]], name: str, place: str) -> int | None:
    """The node that a link names."""
    found = where.get(name, ())
    if len(found) == 1:
        return found[0]
    if found:
        told = f"{place} names its tool, and so do {len(found)} nodes: which one is meant is not known"
        draft.refuse("bad_reference", told, found[0])
    else:
        draft.refuse("unknown_dependency", f"{place} names a tool that no node has", None)
    return None


def split(text: str) -> list[Part]:
    """The parts of a text with references.

    Raises:
        BadText: one is malformed.
    """
    parts: list[Part] = []
    end = 0
    for match in _BRACKETS.finditer(text):
        node = _NODE.fullmatch(match[1])
        if node is not None:
            parts += [text[end : match.start()], (number(node[1]),)]
            end = match.end()
            no_path(text, end)
        elif _LIKE_A_NODE.search(match[1]):
            raise BadText("angle brackets that name a node, and not only that; write '<node-0>'")
    parts.append(text[end:])
    return [part for part in parts if part]
