"""The report of a fit as an HTML page: tables, plotly's charts, and plotly's script, so that nothing is fetched."""

import html
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pprint import pformat
from statistics import median
from string import Template
from typing import Any

# Names that StepMonitor logs below "train/", with the heading and caption of each.
_CURVES = {
    "grad_norm": ("Gradient norm", "Before clipping"),
    "learning_rate": ("Learning rate", "The optimizer's first parameter group"),
    "tokens_per_second": ("Throughput", "Label tokens per second, all ranks"),
    "padding": ("Padding", "Share of all tokens"),
    "peak_memory_gib": ("Peak memory", "GiB, on the rank with the highest"),
    "tflops_per_device": ("Computation", "10¹² floating-point operations per second and device"),
}
# By Okabe and Ito, for the colour-blind. Grey instead of black, and a lighter blue for the thin line of training, since
# theirs are hard to see on a dark page.
_COLOURS = ["#1F8ACB", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#F0E442"]
_PHASES = ("data", "forward", "backward", "optimizer", "device", "validation", "checkpoint", "logging")
_TIME = (
    "Seconds per step on the host of rank 0; click a phase to hide it. Communication is not shown separately: gathering"
    " parameters is part of forward and backward, reducing gradients of backward, the norm for clipping of optimizer. A"
    " GPU runs behind its host: “device” is the wait for it before a step is logged."
)
_FEW = 40  # points that have markers of their own

_Points = Sequence[tuple[int, float]]  # step and value
_Chart = tuple[str, Any]  # its HTML, and what plotly draws in it


def render(
    title: str,
    head: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    first_step: int,
    validated: Mapping[str, Mapping[int, float]],
    configuration: Mapping[str, Any],
) -> str:
    """Build the page. All arguments are shown as text, never as markup or script.

    Args:
        title: Title of the page.
        head: Facts about the run, for a table at the top.
        history: ``StepMonitor.history``.
        first_step: Number of steps before those of ``history``.
        validated: What validation logged, by name and step.
        configuration: Shown at the end of the page; may be nested.
    """
    from plotly.offline import get_plotlyjs  # not on every import of the package

    def of_training(name: str) -> _Points:
        return [(entry["step"], entry[f"train/{name}"]) for entry in history if f"train/{name}" in entry]

    validation = {name: list(points.items()) for name, points in validated.items()}
    losses = {name: points for name, points in validation.items() if "loss" in name.lower()}
    charts = [_chart("Loss", "In training: the mean over a step's window and all ranks", of_training("loss"), losses)]
    charts += [_chart(heading, caption, of_training(name)) for name, (heading, caption) in _CURVES.items()]
    charts += [_chart(name, "", [], {name: points}) for name, points in validation.items() if name not in losses]
    charts += [_phases(history, first_step)]
    drawn = [(text, figure) for text, figure in charts if figure.data]
    steps = [first_step, *(step for _, figure in drawn for trace in figure.data for step in trace.x)]
    margin = max(0.5, (max(steps) - min(steps)) / 50)
    for _, figure in drawn:
        figure.update_xaxes(range=[min(steps) - margin, max(steps) + margin])
    if rates := [rate for _, rate in of_training("tokens_per_second") if math.isfinite(rate)]:
        head = {**head, "Throughput": f"{median(rates):,.0f} label tokens per second (median)"}
    return Template((files(__package__) / "report_page.html").read_text(encoding="utf-8")).substitute(
        title=_escape(title),
        head=_table(head),
        charts="\n".join(text for text, _ in drawn) or "No step was logged.",
        configuration=f"<h2>Configuration</h2>\n<pre>{_escape(pformat(configuration))}</pre>" if configuration else "",
        plotly=get_plotlyjs() if drawn else "",
        # A "<" could end the script element that contains this.
        figures=f"[{','.join(figure.to_json() for _, figure in drawn)}]".replace("<", "\\u003c"),
    )


def _chart(heading: str, caption: str, training: _Points, validation: Mapping[str, _Points] | None = None) -> _Chart:
    """Curves over the step; those without points are left out."""
    figure, finite = _empty_figure(), []
    for name, points in {"training": training, **(validation or {})}.items():
        if not points:
            continue
        figure.add_scatter(
            x=[step for step, _ in points],
            y=[float(f"{value:.6g}") if math.isfinite(value) else None for _, value in points],
            name=_escape(name),
            mode="lines" if len(points) > _FEW else "lines+markers",
            line={"width": 1.5},
            hovertemplate="%{y}",
        )
        finite += [value for _, value in points if math.isfinite(value)]
        if broken := [str(step) for step, value in points if not math.isfinite(value)]:
            more = f" and {len(broken) - 10} more" if len(broken) > 10 else ""
            caption += f"; not finite in {name} at step {', '.join(broken[:10])}{more}"
    if heading == "Gradient norm" and finite and 0 < 100 * min(finite) < max(finite):
        figure.update_yaxes(type="log")
    if heading != "Loss":
        figure.update_yaxes(rangemode="tozero")
    if finite and max(finite) < 1:
        figure.update_yaxes(exponentformat="power")  # no "100µ" for a learning rate
    return _captioned(heading, caption.removeprefix("; ")), figure


def _phases(history: Sequence[Mapping[str, Any]], first_step: int) -> _Chart:
    """Seconds per step, stacked."""
    steps = [entry["step"] for entry in history]
    widths = [step - before for before, step in zip([first_step, *steps], steps, strict=False)]
    seconds = {phase: [entry["seconds"].get(phase, 0.0) for entry in history] for phase in _PHASES}
    total = sum(map(sum, seconds.values()))
    figure = _empty_figure()
    for phase, spent in seconds.items():
        if any(spent):
            figure.add_scatter(
                x=steps,
                y=[float(f"{each / width:.4g}") for each, width in zip(spent, widths, strict=True)],
                stackgroup="phases",
                name=f"{phase} {sum(spent) / total:.0%}",
                mode="lines" if len(steps) > _FEW else "lines+markers",
                hovertemplate="%{y} s",
            )
    figure.update_layout(showlegend=True)
    return _captioned("Time", _TIME, "wide"), figure


def _empty_figure() -> Any:
    import plotly.graph_objects as go

    axis = {"automargin": True, "zeroline": False, "gridcolor": "rgba(128,128,128,0.25)"}
    transparent = dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)")
    return go.Figure(
        layout={
            "template": None,
            "colorway": _COLOURS,
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "xaxis": {**axis, "title": "optimizer step", "hoverformat": ".0f"},
            "yaxis": axis,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
            "hovermode": "x unified",
            "hoverlabel": {"bgcolor": "#333333", "font": {"color": "#ffffff"}},
            **transparent,
        }
    )


def _captioned(heading: str, caption: str, width: str = "half") -> str:
    return (
        f'<figure class="{width}"><h2>{_escape(heading)}</h2><figcaption>{_escape(caption)}</figcaption>'
        '<div class="chart"></div></figure>'
    )


def _table(facts: Mapping[str, Any]) -> str:
    rows = (f"<tr><th>{_escape(name)}</th><td>{_escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table>{''.join(rows)}</table>"


def _escape(value: Any) -> str:
    return html.escape(str(value))
