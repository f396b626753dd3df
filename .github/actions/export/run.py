"""Entry point of the action's steps: `run.py` submits and waits, `run.py --cancel` cancels what a killed step left."""

from __future__ import annotations

import sys

from export_action.job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
