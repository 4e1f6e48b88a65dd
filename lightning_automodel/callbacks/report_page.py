"""The report of a fit as an HTML page with tables, plotly's charts and plotly's script; it fetches nothing."""

import html
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pprint import pformat
from string import Template
from typing import Any

from lightning_automodel.distributed.failures import list_first

# Names that StepMonitor logs below "train/", with the heading and caption of each.
_CURVES = {
    "grad_norm": ("Gradient norm", "Before clipping"),
    "learning_rate": ("Learning rate", "The optimizer's first parameter group"),
    "tokens_per_second": ("Throughput", "Label tokens per second, all ranks"),
}
# Okabe and Ito's palette for the colour-blind. Grey replaces black, and a lighter blue theirs for the thin
# line of training: both are hard to see on a dark page.
_COLOURS = ["#1F8ACB", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#F0E442"]
_AXIS = {
    "automargin": True,
    "zeroline": False,
    "gridcolor": "rgba(128,128,128,0.25)",
    "exponentformat": "power",
}
_LAYOUT = {
    "template": None,
    "colorway": _COLOURS,
    "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
    "xaxis": {**_AXIS, "title": "optimizer step", "hoverformat": ".0f"},
    "yaxis": _AXIS,
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    "hovermode": "x unified",
    "hoverlabel": {"bgcolor": "#333333", "font": {"color": "#ffffff"}},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
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
    from plotly.offline import get_plotlyjs  # imported here, since plotly is optional and slow to import

    def of_training(name: str) -> dict[str, dict[int, float]]:
        return {"training": {entry["step"]: entry[name] for entry in history if name in entry}}

    losses = {name: points for name, points in validated.items() if "loss" in name.lower()}
    caption = "In training: the mean over a step's window and all ranks"
    charts = [_chart("Loss", caption, {**of_training("train/loss"), **losses})]
    for name, (heading, text) in _CURVES.items():
        charts.append(_chart(heading, text, of_training(f"train/{name}")))
    charts += [_chart(name, "", {name: points}) for name, points in validated.items() if name not in losses]
    drawn = [(text, figure) for text, figure in charts if figure.data]
    rows = [f"<tr><th>{_escape(name)}</th><td>{_escape(value)}</td></tr>" for name, value in head.items()]
    options = ""
    if configuration:
        options = f"<h2>Configuration</h2>\n<pre>{_escape(pformat(configuration))}</pre>"
    template = (files(__package__) / "report_page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=_escape(title),
        head="".join(rows),
        charts="\n".join(text for text, _ in drawn) or "No step was logged.",
        configuration=options,
        plotly=get_plotlyjs() if drawn else "",
        # A "<" could end the script element that contains this.
        figures=f"[{','.join(figure.to_json() for _, figure in drawn)}]".replace("<", "\\u003c"),
    )


def _chart(heading: str, caption: str, curves: _Curves) -> tuple[str, Any]:
    """A chart's HTML, and the figure that plotly draws in it. Curves without points are left out."""
    import plotly.graph_objects as go

    figure = go.Figure(layout=_LAYOUT)
    for name, points in curves.items():
        if not points:
            continue
        figure.add_scatter(
            x=list(points),
            y=[float(f"{value:.6g}") if math.isfinite(value) else None for value in points.values()],
            name=_escape(name),
            mode="lines" if len(points) > 40 else "lines+markers",
            line={"width": 1.5},
        )
        if broken := [str(step) for step, value in points.items() if not math.isfinite(value)]:
            caption += f"; not finite in {name} at step {list_first(broken, 10)}"
    text = (
        f'<figure class="half"><h2>{_escape(heading)}</h2>'
        f'<figcaption>{_escape(caption.removeprefix("; "))}</figcaption><div class="chart"></div></figure>'
    )
    return text, figure


def _escape(value: Any) -> str:
    return html.escape(str(value))
