"""Draw peak memory against the size of the weights, ours and upstream's, from results/cuda_memory.json.

python -m tests.bench.cuda_plot        # writes tests/bench/results/cuda_memory.svg
"""

from __future__ import annotations

import json

import pygal

from tests.bench.cuda_memory import CASES, RESULTS

FIGURES = {"host_rss_peak_gib": "host RSS", "host_anon_peak_gib": "host anonymous", "gpu_peak_gib": "GPU"}


def main() -> None:
    """Write the chart; upstream's points are those that were measured, its line is not continued."""
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if row["case"] in CASES]
    chart = pygal.XY(
        title="Peak memory of a CUDA export (GiB) against its weights (GiB)",
        x_title="weights, GiB of bf16",
        disable_xml_declaration=True,
        js=[],
    )
    for side in ("upstream-strict", "upstream", "ours"):
        for figure, name in FIGURES.items():
            points = [
                (round(CASES[row["case"]] * 3 * 4096 * 14336 * 2 / 2**30, 2), row["figures"][figure])
                for row in rows
                if row["side"] == side
            ]
            chart.add(f"{side}: {name}", sorted(points))
    RESULTS.with_suffix(".svg").write_text(str(chart.render()))


if __name__ == "__main__":
    main()
