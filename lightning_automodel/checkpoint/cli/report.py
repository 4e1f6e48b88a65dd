"""What an inspection found, as text."""

from lightning_automodel.checkpoint.cli.inspect import Report

_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def as_text(report: Report) -> str:
    """Several lines on one checkpoint."""
    lines = {
        "path": report.path,
        "form": report.form,
        "written by": report.written_by,
        "world size": "unknown" if report.world_size is None else str(report.world_size),
        "mesh": ", ".join(f"{name} {size}" for name, size in report.mesh.items()) or "unknown",
        "state": _state(report),
        "epoch": "unknown" if report.epoch is None else str(report.epoch),
        "optimizer steps": "unknown" if report.global_step is None else str(report.global_step),
        "elements": f"{report.num_parameters:,} ({_counts(report.dtypes)})",
        **{name: _bytes(size) for name, size in report.num_bytes.items()},
        **{
            f"optimizer {index}": f"state of parameters: {_counts(kinds)}"
            for index, kinds in enumerate(report.optimizer_states)
        },
        "Hugging Face": ", ".join(f"{prefix} {name}" for prefix, name in report.hugging_face.items()) or "none",
        "also holds": ", ".join(report.rest) or "nothing",
    }
    return "\n".join(f"{name + ':':<17}{value}" for name, value in lines.items())


def as_line(report: Report, is_newest: bool) -> str:
    """One line on one of several."""
    at = f"epoch {report.epoch}, step {report.global_step}, {_bytes(sum(report.num_bytes.values()))}, {report.form}"
    return f"{report.path}: {at}, {_state(report)}{' (newest)' if is_newest else ''}"


def _state(report: Report) -> str:
    if report.damage is not None:
        return f"DAMAGED: {report.damage}"
    state = "complete, all content verified" if report.verified else "complete by its files' names and sizes"
    needs = f"; loads with weights_only=False alone, it holds {', '.join(report.not_plain)}" if report.not_plain else ""
    return f"{state}{needs}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"


def _bytes(size: float) -> str:
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} {_UNITS[-1]}"
