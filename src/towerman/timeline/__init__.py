"""One batch drawn: who ran when, who waited, and for what.

Theory. Every call is one row, in emitted order, on one time axis that starts when the batch came in. A row has up
to four stretches, and they look different: held in the plan behind a call of its own batch, waiting in the queue,
running, and work that goes on after the result was sealed. A call that was tried again waits and runs several times,
and rests in between. A call that never started ends in a cross, one that the run of another call answered in a diamond.
The story of a batch comes either as spans or as the events that observers saw; `stories` turns the second into the
first.

House rules. Pure: no terminal, no clock, no colour library. No line is wider than asked. Nothing that came from
outside is printed as it is: control, format and unassigned characters are escaped, so that a tool's name can
neither move the cursor nor turn the text around.

Not here: tables of results and the live view (cli), files of events (observers).
"""

from towerman.timeline.drawing import LEAST_WIDTH, draw
from towerman.timeline.picture import MOST_ROWS, draw_svg
from towerman.timeline.stories import Story, stories
from towerman.timeline.words import columns, fit, printable

__all__ = ["LEAST_WIDTH", "MOST_ROWS", "Story", "columns", "draw", "draw_svg", "fit", "printable", "stories"]
