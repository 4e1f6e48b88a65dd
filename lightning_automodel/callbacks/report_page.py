"""The report of a fit as an HTML page with tables, plotly's charts and plotly's script; it fetches nothing."""

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pprint import pformat
from string import Template
from typing import Any

# Names that StepMonitor logs below "train/", with the heading of each.
_CURVES = {
    "loss": "Loss",
    "grad_norm": "Gradient norm, before clipping",
    "learning_rate": "Learning rate, of the first parameter group",
    "tokens_per_second": "Label tokens per second, all ranks",
}
_HEIGHT = 300  # of a chart, in pixels
_LAYOUT = {
    "template": "none",
    "paper_bgcolor": "rgba(0,0,0,0)",  # the page's own, which may be dark
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 60, "r": 8, "t": 40, "b": 40},
    "dragmode": False,  # on a phone, dragging scrolls the page
}

_Curves = Mapping[str, Mapping[int, float]]  # values by name and step


def render(
    title: str,
    head: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    validated: _Curves,
    configuration: Mapping[str, Any],
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
    rows = [f"<tr><th>{_escape(name)}</th><td>{_escape(value)}</td></tr>" for name, value in head.items()]
    template = (files(__package__) / "report_page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=_escape(title),
        head="".join(rows),
        charts=_draw(drawn) if drawn else "No step was logged.",
        configuration=_escape(pformat(configuration)),
    )


def _draw(charts: Mapping[str, _Curves]) -> str:
    """Charts, one below the other, and the script that draws them. Values that are not finite are gaps."""
    from plotly.subplots import make_subplots  # imported here, since plotly is optional and slow to import

    figure = make_subplots(rows=len(charts), cols=1, subplot_titles=list(map(_escape, charts)))
    figure.update_layout(_LAYOUT, height=_HEIGHT * len(charts))
    for row, curves in enumerate(charts.values(), 1):
        for name, points in curves.items():
            figure.add_scatter(
                x=list(points),
                y=list(points.values()),
                name=_escape(name),
                mode="lines+markers",
                showlegend=len(curves) > 1,
                row=row,
                col=1,
            )
    figure.update_xaxes(title="optimizer step")
    drawn: str = figure.to_html(full_html=False, config={"responsive": True})
    return drawn


def _escape(value: Any) -> str:
    return html.escape(str(value))
