"""Placeholders: texts that a model writes in place of a value that it does not have yet.

Theory. A model that wants the result of one call in another call of the same response has no way to say so, and many
write something all the same: `<from previous call>`, `$PREV`, `${order_id}`, `output_of_step_1`. A handler would take
it for a value. Whether a text is one cannot be told from it alone: it is weighed against what the argument is
for, what the tool is for, and what other calls of the batch are there.

Six files: `patterns` are those by which texts are read; `words` are the words that placeholders are made of; `roles`
says what an argument is for; `reading` what a text says of itself; `judging` weighs the two; `guard` is compiled for
each tool and goes through the arguments of a call.

House rules. Deterministic, in linear time on any JSON value of any depth, without an exception. No value is in
what is told. An empty text is no placeholder. A doubt is decided for the value.

Not here: references in plans (plan), whether values fit their schema (arguments).
"""

from towerman.placeholders.guard import Found, Guard, check_free_text, refusal, told, warning
from towerman.placeholders.judging import Others

__all__ = ["Found", "Guard", "Others", "check_free_text", "refusal", "told", "warning"]
