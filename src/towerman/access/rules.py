"""All that one tool's calls touch: its compiled reads and writes together.

Theory. The accesses of all declared reads and writes, without repeats. A write covers a read of the same node, or of
a node below its subtree: then one lock is enough.

House rules. What cannot change from call to call is computed once.

Not here: how one template or callable is read (declarations), what a ledger is told of it (locks).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from towerman.access.declarations import Foresee, Read, compiled
from towerman.access.locks import keys_above
from towerman.calls import Access
from towerman.policy import Declared


@dataclass(frozen=True, slots=True, eq=False)
class AccessRule:
    """What one tool's calls touch, compiled from its `reads` and `writes`.

    Attributes:
        reads: what people are shown of the declared reads: templates, `callable NAME`.
        writes: the same of the writes.
        may_subtree: some call may touch a subtree; a callable may always.
        depends_on_arguments: two calls may differ in what they touch. False also means that the accesses never change,
            so that they may be computed once; a literal `file:` template is therefore True: links move.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    may_subtree: bool
    depends_on_arguments: bool
    _sources: tuple[Read, ...] = field(repr=False)
    _foresights: tuple[Foresee, ...] = field(repr=False)

    @classmethod
    def compile(
        cls, reads: Declared | None, writes: Declared | None, *, names: frozenset[str] | None, tool: str
    ) -> AccessRule:
        """Check and compile what a tool declares.

        Args:
            reads: a template, a callable of the arguments, or a list of these; None for nothing. A callable is called
                with the arguments that it names as keywords (`**kwargs` takes all); one whose single parameter is
                called `arguments` gets a mapping of them all. It returns a resource name, a list of them, or None.
            writes: the same. What is written need not be declared as read.
            names: the tool's parameters, or None when they are not known.
            tool: its name, for messages.

        Raises:
            PolicyError: names the tool, the template, what is wrong with it and the fix.
        """
        read, written = compiled(reads, False, names, tool), compiled(writes, True, names, tool)
        sources = (*read, *written)
        fixed = all(source.fixed for source in sources)
        twice = [source.declared for source in written]
        needed = (*(one for one in read if one.declared not in twice), *written)
        steps = tuple(source.read for source in needed)
        rule = cls(
            reads=tuple(source.label for source in read),
            writes=tuple(source.label for source in written),
            may_subtree=any(source.subtree for source in sources),
            depends_on_arguments=not fixed,
            _sources=steps,
            _foresights=tuple(source.foresee for source in needed),
        )
        if not fixed or not steps:
            return rule
        accesses = rule.accesses({})
        object.__setattr__(rule, "_sources", (lambda arguments: accesses,))
        return rule

    def accesses(self, arguments: Mapping[str, object]) -> tuple[Access, ...]:
        """What a call with these arguments touches, without repeats; a read that a write covers is left out.

        Args:
            arguments: checked arguments by name, the defaults of those that were left out included.

        Raises:
            AccessRefused: the call must not run, for what it touches cannot be told.
        """
        sources = self._sources
        if len(sources) == 1:
            return sources[0](arguments)
        found = {
            (access.key, access.subtree, access.write): access for source in sources for access in source(arguments)
        }
        if self.reads and self.writes:
            return _without_covered(tuple(found.values()))
        return tuple(found.values())

    def foreseen(self, arguments: Mapping[str, object], unknown: Collection[str]) -> tuple[Access, ...] | None:
        """What a call may touch of which some arguments are not known yet (rule S1): where a template names one of
        these, the node that the text before it leads to, and all below it.

        Args:
            arguments: as the model wrote them, not checked; defaults may be missing.
            unknown: names of those whose values are not there yet, or only in part.

        Returns:
            The accesses; None: nothing can be said. What `accesses` gives later may be elsewhere all the same, where
            the check of the arguments changes them or a path leads upwards: compare (`within`).
        """
        found: dict[tuple[str, bool, bool], Access] = {}
        for foresee in self._foresights:
            accesses = foresee(arguments, unknown)
            if accesses is None:
                return None
            found |= {(access.key, access.subtree, access.write): access for access in accesses}
        return _without_covered(tuple(found.values()))


def _without_covered(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
    nodes = {access.key for access in accesses if access.write and not access.subtree}
    trees = {access.key for access in accesses if access.write and access.subtree}

    def is_covered(read: Access) -> bool:
        if read.key in nodes and not read.subtree:
            return True
        return bool(trees) and not trees.isdisjoint((read.key, *keys_above(read.key)))

    return tuple(access for access in accesses if access.write or not is_covered(access))
