"""One module for each plot; all of them give a figure with its words and its table, or None."""

from __future__ import annotations
