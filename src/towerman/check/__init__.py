"""Is a tower ready for tools that run at the same time? Nine questions, answered from what was declared.

Theory. Nearly all that goes wrong with concurrent tools is visible before the first call: a tool that says nothing of
what it touches, a limit that counts for each run alone, a queue without an end, a write that nobody can repeat safely.
So the declarations are read, and three things come of it: an answer to each of the nine questions that one should ask
before enabling concurrent tools (R-140), the limits and budgets with the scope that is in force for each, and findings,
each of which names the place and the fix.

The parts are files: `parts` are the words of a report, `findings` looks for what is wrong, `answers` answers the
questions, `report` is the face.

House rules. Pure, and of declarations only: nothing is called, imported or measured. A finding is an error where
declared protection is not there, a warning where an operator should decide, a note where something has no effect.
What cannot be known from declarations is said to be unknown, never guessed.

Not here: whether a declaration is well-formed (policy), what a batch would do (explain), what a tower did (report).
"""

from towerman.check.parts import Answer, BudgetInForce, Finding, LimitInForce, Severity
from towerman.check.report import CheckReport, check

__all__ = ["Answer", "BudgetInForce", "CheckReport", "Finding", "LimitInForce", "Severity", "check"]
