"""The pictures that a page shows: memory over time with stages and budgets, and a badge. SVG without scripts.

`memory_svg` is made with pygal; stage bands and budget lines are laid under its curves. The picture carries one style
element (both colour schemes); `style_hash` gives the CSP source that allows exactly that.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

import pygal

from service.web.timeline import Timeline
from service.web.words import size

# pygal leaves an import hook for map plug-ins, of a kind that Python 3.11 warns of at each import and 3.12 ignores.
sys.meta_path[:] = [hook for hook in sys.meta_path if not isinstance(hook, pygal.PluginImportFixer)]

WIDTH, HEIGHT = 960, 320
_CURVES = (("host anonymous", "host_anon"), ("host RSS", "host_rss"), ("GPU", "gpu"))
_BUDGETS = (("hostMemory", "host budget"), ("gpuMemory", "GPU budget"))
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800)
_BADGE = {
    "queued": "#6b7280",
    "starting": "#2563eb",
    "running": "#2563eb",
    "succeeded": "#15803d",
    "failed": "#b91c1c",
    "cancelled": "#92660a",
}


def memory_svg(timeline: Timeline, budgets: Mapping[str, Any]) -> bytes:
    """Memory of the process tree over one attempt. Without samples, a picture that says so."""
    limits = [(label, int(budgets[key])) for key, label in _BUDGETS if budgets.get(key)]
    highest = max(
        [max(item.host_anon, item.host_rss, item.gpu) for item in timeline.samples] + [value for _, value in limits],
        default=0,
    )
    ticks = memory_ticks(highest)
    length = max(timeline.length, 1.0)
    curves = [curve for curve in _CURVES if any(getattr(item, curve[1]) for item in timeline.samples)] or _CURVES[:1]
    chart = pygal.XY(
        width=WIDTH,
        height=HEIGHT,
        explicit_size=False,
        show_dots=False,
        stroke_style={"width": 2},
        js=[],
        no_prefix=True,
        show_legend=True,
        legend_at_bottom=True,
        legend_at_bottom_columns=len(curves),
        truncate_label=-1,
        legend_box_size=10,
        margin=8,
        spacing=8,
        range=(0, ticks[-1]),
        xrange=(0, length),
        y_labels=ticks,
        x_labels=time_ticks(length),
        value_formatter=size,
        x_value_formatter=clock,
        no_data_text="no samples yet",
        disable_xml_declaration=False,
        pretty_print=False,
        show_x_guides=False,
    )
    for label, field in curves:
        chart.add(label, [(item.at, getattr(item, field)) for item in timeline.samples])
    chart.add_xml_filter(lambda root: _finish(chart, root, timeline, limits))
    return bytes(chart.render())


def memory_ticks(highest: int) -> list[int]:
    """Round binary values from 0 to a bit more than `highest` bytes (room for the stages' names), six or so."""
    top = highest * 1.12
    step = 2 ** max(20, math.ceil(math.log2(max(top, 1) / 6)))
    return [step * index for index in range(max(1, math.ceil(top / step)) + 1)]


def time_ticks(length: float) -> list[int]:
    """Round values from 0 to `length` seconds, eight at most."""
    step = next((step for step in _TIME_STEPS if length / step <= 8), math.ceil(length / 8))
    return list(range(0, int(length) + 1, step))


def clock(seconds: float) -> str:
    """``0:45``, ``12:30``, ``1:02:30``."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def style_hash(svg: bytes) -> str:
    """CSP sources (``'sha256-…'``) of the style elements in `svg`, separated by blanks."""
    found = re.findall(rb"<style[^>]*>(.*?)</style>", svg, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in found)


def badge_svg(state: str) -> bytes:
    """A small badge, ``export | STATE``; an unknown state is shown as it is not known."""
    colour = _BADGE.get(state)
    text = state if colour else "unknown"
    left, right = 54, 14 + 7 * len(text)
    root = Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "width": str(left + right),
            "height": "20",
            "role": "img",
            "aria-label": f"export: {text}",
        },
    )
    SubElement(root, "title").text = f"export: {text}"
    SubElement(root, "rect", {"width": str(left + right), "height": "20", "rx": "4", "fill": "#30363d"})
    SubElement(root, "path", {"d": _right_side(left, right), "fill": colour or "#6b7280"})
    group = SubElement(
        root,
        "g",
        {"fill": "#fff", "font-family": "Verdana,DejaVu Sans,sans-serif", "font-size": "11", "text-anchor": "middle"},
    )
    SubElement(group, "text", {"x": str(left / 2), "y": "14"}).text = "export"
    SubElement(group, "text", {"x": str(left + right / 2), "y": "14"}).text = text
    return bytes(tostring(root, encoding="utf-8"))


def _right_side(left: int, width: int) -> str:
    return f"M{left} 0h{width - 4}a4 4 0 0 1 4 4v12a4 4 0 0 1-4 4h-{width - 4}z"


def _finish(chart: Any, root: Element, timeline: Timeline, limits: Sequence[tuple[str, int]]) -> Element:
    """Leave one style element and no script, name the picture, and put bands and budget lines behind the curves."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("script", "title", "desc", "style") or not isinstance(child.tag, str):
                parent.remove(child)
            child.attrib.pop("style", None)
    root.attrib.pop("id", None)
    root.set("role", "img")
    style = Element("style")
    style.text = _style("memory.css")
    root.insert(0, style)
    title = Element("title")
    title.text = "Memory of the export over time"
    root.insert(0, title)
    plot = next((node for node in root.iter() if node.get("class") == "plot"), None)
    if plot is None or not timeline.samples:
        return root
    below = Element("g", {"class": "bands"})
    named_to = [0.0, 0.0, 0.0]
    for span in timeline.spans:
        _band(chart.view, below, span.name, (span.start, timeline.closed(span)), named_to)
    plot.insert(1, below)
    for label, value in limits:
        _limit(chart.view, plot, label, value, max(timeline.length, 1.0))
    return root


def _band(view: Any, group: Element, name: str, extent: tuple[float, float], named_to: list[float]) -> None:
    """Shade one stage, and name it in the first of three lines that is free from its left edge on."""
    start, end = extent
    left, right, top, bottom = view.x(start), view.x(end), view.y(view.box.ymax), view.y(0)
    width = max(1.0, right - left)
    SubElement(
        group,
        "rect",
        {
            "class": f"band {name}",
            "x": f"{left:.1f}",
            "y": f"{top:.1f}",
            "width": f"{width:.1f}",
            "height": f"{bottom - top:.1f}",
        },
    )
    line = next((index for index, edge in enumerate(named_to) if left >= edge), None)
    if width > 6 * len(name) and line is not None:
        named_to[line] = left + 10 + 6 * len(name)
        place = {"class": "band-name", "x": f"{left + 5:.1f}", "y": f"{top + 12 * (line + 1):.1f}"}
        SubElement(group, "text", place).text = name


def _limit(view: Any, plot: Element, label: str, value: int, length: float) -> None:
    height = f"{view.y(value):.1f}"
    SubElement(
        plot,
        "line",
        {"class": "limit", "x1": f"{view.x(0):.1f}", "x2": f"{view.x(length):.1f}", "y1": height, "y2": height},
    )
    text = SubElement(
        plot, "text", {"class": "limit-name", "x": f"{view.x(length) - 4:.1f}", "y": f"{view.y(value) - 4:.1f}"}
    )
    text.text = f"{label} {size(value)}"


def _style(name: str) -> str:
    return (files("service.web") / "static" / name).read_text(encoding="utf-8")
