"""The public face of the core: towers, runs, and what they look like in numbers.

Four files, each standing on those before it: `statistics` is numbers at one instant; `run` answers batches;
`declaring` takes tools and options; `tower` binds all of it together.
"""

from towerman.tower.run import Run
from towerman.tower.tower import Tower

__all__ = ["Run", "Tower"]
