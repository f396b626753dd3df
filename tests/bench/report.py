"""Write the benchmark tables of the README from tests/bench/results/*.json, so that no figure is typed by hand.

Between `<!-- bench:NAME -->` and `<!-- /bench -->` stands the table of results/NAME.json, between `<!-- settings -->`
and `<!-- /settings -->` that of the service's settings. `--check` only says whether the README is up to date (exit 1 if
not).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from service.settings import settings_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"(<!-- bench:([a-z0-9_]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)

SETTINGS = re.compile(r"(<!-- settings -->\n).*?(<!-- /settings -->)", re.DOTALL)

COLUMNS = {
    "cuda_memory": ["host_anon_peak_gib", "host_rss_peak_gib", "gpu_peak_gib", "disk_weight_bytes", "wall_s"],
    "cuda_parity": ["keys", "segments", "segment_set_equal", "max_relative_error"],
    "store": ["upload_mb_s", "pull_mb_s", "cpu_s", "rss_peak_mib", "ratio_to_s5cmd", "slower_share_of_ceiling"],
    "service": ["post_p50_ms", "post_p99_ms", "get_p50_ms", "get_p99_ms", "errors"],
}
"""The figures that the README shows of each benchmark; all of them are in the results."""


def table(result: dict[str, Any]) -> str:
    """A Markdown table: one line per case and side, a column for each of `COLUMNS`, else for all figures."""
    found = list(dict.fromkeys(name for row in result["rows"] for name in row["figures"]))
    columns = [name for name in COLUMNS.get(result["name"], found) if name in found]
    lines = ["| case | side | " + " | ".join(columns) + " |", "| --- | --- |" + " ---: |" * len(columns)]
    for row in result["rows"]:
        cells = [figure(row["figures"].get(name)) for name in columns]
        lines.append(f"| {row['case']} | {row['side']} | " + " | ".join(cells) + " |")
    host = result.get("host", {})
    where = ", ".join(str(host[key]) for key in ("name", "gpu", "cpu", "cores") if host.get(key))
    lines += ["", f"{result['date']}; {where}; `{result['command']}`"]
    return "\n".join(lines) + "\n"


def figure(value: Any) -> str:
    """A figure as the table shows it: three significant digits, integers whole, nothing for an absent one."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def render(readme: str) -> str:
    """The README with every block filled; a block without a result file stays empty."""

    def fill(match: re.Match[str]) -> str:
        path = RESULTS / f"{match[2]}.json"
        return match[1] + (table(json.loads(path.read_text())) if path.exists() else "") + match[3]

    return SETTINGS.sub(lambda match: match[1] + settings_table() + match[2], BLOCK.sub(fill, readme))


def main() -> int:
    """Rewrite the README, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the README is out of date")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    before = path.read_text()
    after = render(before)
    if check:
        return int(before != after)
    path.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
