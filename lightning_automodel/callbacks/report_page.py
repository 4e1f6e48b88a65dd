"""The report of a fit as an HTML page with facts, plotly's charts and plotly's script; it fetches nothing."""

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pprint import pformat
from typing import Any

_HEIGHT = 300  # of a chart, in pixels

_Curves = Mapping[str, Mapping[int, float]]  # values by name and step


def render(
    title: str, facts: Mapping[str, Any], history: Sequence[Mapping[str, Any]], validated: _Curves
) -> str:
    """Build the page. All arguments are shown as text, never as markup or script.

    ``history`` is ``StepMonitor.history``; ``validated`` has those of validation, by name and step.
    """
    curves: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for entry in history:
        for name in entry.keys() - {"step"}:
            curves[name][entry["step"]] = entry[name]
    charts: defaultdict[str, dict[str, Mapping[int, float]]] = defaultdict(dict)
    for name, points in sorted({**curves, **validated}.items()):
        charts["loss" if "loss" in name.lower() else name][name] = points
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{html.escape(title)}: training report</title>\n<h1>{html.escape(title)}</h1>\n"
        f"{_draw(charts) if charts else 'No step was logged.'}\n"
        f'<pre style="white-space: pre-wrap">{html.escape(pformat(facts, sort_dicts=False))}</pre>\n'
    )


def _draw(charts: Mapping[str, _Curves]) -> str:
    """Charts, one below the other, and the script that draws them. Values that are not finite are gaps."""
    from plotly.subplots import make_subplots  # imported here, since plotly is optional and slow to import

    figure = make_subplots(rows=len(charts), cols=1, subplot_titles=list(map(html.escape, charts)))
    # On a phone, dragging scrolls the page.
    figure.update_layout(height=_HEIGHT * len(charts), dragmode=False)
    figure.update_xaxes(title="optimizer step")
    for row, curves in enumerate(charts.values(), 1):
        for name, points in curves.items():
            figure.add_scatter(
                x=list(points),
                y=list(points.values()),
                name=html.escape(name),
                row=row,
                col=1,
            )
    drawn: str = figure.to_html(full_html=False, config={"responsive": True})
    return drawn
