"""The real service with `scripted_exporter` in the place of `python -m exporter`."""

from __future__ import annotations

import sys
from pathlib import Path

from service.__main__ import serve
from service.settings import load_settings

if __name__ == "__main__":
    serve(load_settings(), command=(sys.executable, "-P", str(Path(__file__).with_name("scripted_exporter.py"))))
