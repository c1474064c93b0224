"""Plans as planners write them: every form becomes the same batch of calls, with references in native syntax.

Theory. Planners agree on what a plan is (steps, what they take from one another) and on nothing else. A form is read
once, into calls that a tower can link (plan) and run; from there on nobody knows which form it was, but for what the
form promised: whether a step may use a later one, and whether its ids are numbers.

A reader is pure, and knows no tool but by what it is told: the names of its parameters, for forms that give arguments
without names, and whether a parameter takes a list.

Files: `document` is what a plan is read into, and how it is refused; `literals` reads arguments that are written as in
Python; one file for each form; `reading` tells the forms apart.

House rules. What is written is read, or the whole plan is refused, with the line or the place and the fix: nothing is
guessed, nothing mended, nothing lost without a word. Input that is no plan is an `InputError`. Where its calls could
be seen, the batch says that it is refused, so that each of them gets its answer. Messages hold no value of an argument.

Not here: linking and circles (plan), whether a tool exists (tools), what is sent back (adapters).
"""

from towerman.forms.document import Tools
from towerman.forms.reading import FORMS, find_form, is_form, read_plan

__all__ = [
    "FORMS",
    "Tools",
    "find_form",
    "is_form",
    "read_plan",
]
