"""Lets tests import the action's own package, as its entry point does."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parents[3] / ".github" / "actions" / "export")
if FOLDER not in sys.path:
    sys.path.append(FOLDER)
