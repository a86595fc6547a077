"""The fixtures that several modules share."""

from .stores import kept as kept
from .stores import postgresql as postgresql
