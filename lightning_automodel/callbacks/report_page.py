"""The report of a fit as an HTML page with facts, plotly's charts and plotly's script; it fetches nothing."""

import html
from collections.abc import Mapping, Sequence
from pprint import pformat
from typing import Any

# Names that StepMonitor logs below "train/", with the heading of each.
_CURVES = {
    "loss": "Loss",
    "grad_norm": "Gradient norm, before clipping",
    "learning_rate": "Learning rate, of the first parameter group",
    "tokens_per_second": "Label tokens per second, all ranks",
}
_HEIGHT = 300  # of a chart, in pixels

_Curves = Mapping[str, Mapping[int, float]]  # values by name and step


def render(
    title: str, facts: Mapping[str, Any], history: Sequence[Mapping[str, Any]], validated: _Curves
) -> str:
    """Build the page. All arguments are shown as text, never as markup or script.

    ``history`` is ``StepMonitor.history``. ``validated`` holds the values that validation logged, by name and
    step.
    """
    charts: dict[str, dict[str, Mapping[int, float]]] = {}
    for name, heading in _CURVES.items():
        key = f"train/{name}"
        charts[heading] = {"training": {entry["step"]: entry[key] for entry in history if key in entry}}
    for name, points in validated.items():
        heading = "Loss" if "loss" in name.lower() else name
        charts.setdefault(heading, {})[name] = points
    drawn = {heading: curves for heading, curves in charts.items() if any(curves.values())}
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{html.escape(title)}: training report</title>\n<h1>{html.escape(title)}</h1>\n"
        f"{_draw(drawn) if drawn else 'No step was logged.'}\n"
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
                mode="lines+markers",
                showlegend=len(curves) > 1,
                row=row,
                col=1,
            )
    drawn: str = figure.to_html(full_html=False, config={"responsive": True})
    return drawn
