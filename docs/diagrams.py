"""Draws the Mermaid flowcharts of the pages as SVG when the site is built.

GitHub draws Mermaid itself. A site would need Mermaid's script from another host, so that it could not be
read offline. This module understands the part of the language that the pages use: `flowchart TD`,
`accTitle:`, `accDescr:`, nodes `name["line<br>line"]`, and edges `a --> b` and `a -- "text" --> b`, chained
or not, without a cycle. The first line of a node says what happens, the others name files. Anything else
raises a ValueError, and a strict build fails.
"""

import html
import re
from dataclasses import dataclass, field
from itertools import count, pairwise

NODE = re.compile(r'\s*(\w+)(?:\["([^"]*)"\])?')
EDGE = re.compile(r'\s*(?:--\s*"([^"]*)"\s*)?-->')
# In pixels.
SPACE_X = 28
SPACE_Y = 46
PADDING = 12
LINE_HEIGHT = 20
LETTER_WIDTH = 7.3
STYLE = (
    ".diagram text{font:14px system-ui,sans-serif;fill:#222;text-anchor:middle}"
    ".diagram .file{font:12.5px ui-monospace,monospace;fill:#555}"
    ".diagram .edge{font-size:13px;font-style:italic;stroke:#fff;stroke-width:5px;paint-order:stroke}"
    ".diagram rect{fill:#eef1fb;stroke:#3949ab}.diagram path{fill:none;stroke:#777}"
)


@dataclass
class Node:
    """A box: its lines of text, the nodes before it, and where it is drawn."""

    lines: list[str] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    layer: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        """In pixels."""
        return max(len(line) for line in self.lines) * LETTER_WIDTH + 2 * PADDING

    @property
    def height(self) -> float:
        """In pixels."""
        return len(self.lines) * LINE_HEIGHT + PADDING


@dataclass
class Flowchart:
    """What a block of Mermaid says."""

    title: str = ""
    description: str = ""
    nodes: dict[str, Node] = field(default_factory=dict)
    labels: dict[tuple[str, str], str] = field(default_factory=dict)  # by edge


def svg_of(source: str, number: int = 0) -> str:
    """Returns the SVG of a flowchart; `number` makes the ids in it unique on a page."""
    chart = parse(source)
    width, height = place(chart.nodes)
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    ids = f"diagram-{number}-title diagram-{number}-desc"
    parts = [
        f'<svg class="diagram" xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="{ids}">',
        f'<title id="diagram-{number}-title">{html.escape(chart.title)}</title>',
        f'<desc id="diagram-{number}-desc">{html.escape(chart.description)}</desc>',
        f"<style>{STYLE}</style>",
    ]
    parts += [_edge(chart, parent, child) for parent, child in chart.labels]
    parts += [_box(node) for node in chart.nodes.values()]
    parts += [_label(chart, parent, child) for parent, child in chart.labels]
    return "".join([*parts, "</svg>"])


# --- Reading ----------------------------------------------------------------------------------------------------------


def parse(source: str) -> Flowchart:
    """Reads a block of Mermaid; a ValueError names the line that is not understood."""
    first, *lines = [line.strip() for line in source.strip().splitlines() if line.strip()]
    if first != "flowchart TD":
        raise ValueError(f"only 'flowchart TD' is drawn, not {first!r}")
    chart = Flowchart()
    for line in lines:
        if line.startswith("accTitle:"):
            chart.title = line.partition(":")[2].strip()
        elif line.startswith("accDescr:"):
            chart.description = line.partition(":")[2].strip()
        else:
            _read_chain(chart, line)
    if without := [name for name, node in chart.nodes.items() if not node.lines]:
        raise ValueError(f"these nodes have no text: {', '.join(without)}")
    return chart


def _read_chain(chart: Flowchart, line: str) -> None:
    """Adds the nodes and edges of one line."""
    names: list[str] = []
    texts: list[str] = []
    position = 0
    while True:
        node = NODE.match(line, position)
        if node is None:
            raise ValueError(f"this line is not understood: {line!r}")
        name, text = node.groups()
        known = chart.nodes.setdefault(name, Node())
        known.lines = known.lines if text is None else text.split("<br>")
        names.append(name)
        position = node.end()
        edge = EDGE.match(line, position)
        if edge is None:
            break
        texts.append(edge[1] or "")
        position = edge.end()
    if line[position:].strip():
        raise ValueError(f"this line is not understood: {line!r}")
    for (parent, child), text in zip(pairwise(names), texts, strict=True):
        chart.nodes[child].parents.append(parent)
        chart.labels[parent, child] = text


# --- Placing ----------------------------------------------------------------------------------------------------------


def place(nodes: dict[str, Node]) -> tuple[float, float]:
    """Gives each node its place, in layers from above, below its parents. Returns the size of the picture."""
    for _ in nodes:
        for node in nodes.values():
            node.layer = max((nodes[parent].layer + 1 for parent in node.parents), default=0)
    if max(node.layer for node in nodes.values()) >= len(nodes):
        raise ValueError("the edges go round in a cycle")
    top = PADDING
    for layer in count():
        members = [node for node in nodes.values() if node.layer == layer]
        if not members:
            break
        _spread(members, nodes)
        height = max(node.height for node in members)
        for node in members:
            node.y = top + height / 2
        top += height + SPACE_Y
    left = min(node.x - node.width / 2 for node in nodes.values()) - PADDING
    for node in nodes.values():
        node.x -= left
    return max(node.x + node.width / 2 for node in nodes.values()) + PADDING, top - SPACE_Y + PADDING


def _spread(members: list[Node], nodes: dict[str, Node]) -> None:
    """Puts the nodes of a layer below the middle of their parents, and apart where they would overlap."""
    for node in members:
        above = [nodes[parent].x for parent in node.parents]
        node.x = sum(above) / len(above) if above else 0.0
    members.sort(key=lambda node: node.x)
    groups: list[list[Node]] = []
    for node in members:
        groups.append([node])
        while len(groups) > 1 and _right(groups[-2]) + SPACE_X > _left(groups[-1]):
            last = groups.pop()
            groups[-1] += last
            _line_up(groups[-1])


def _line_up(group: list[Node]) -> None:
    """Puts nodes side by side, around the middle of where they were."""
    total = sum(node.width for node in group) + SPACE_X * (len(group) - 1)
    left = sum(node.x for node in group) / len(group) - total / 2
    for node in group:
        node.x = left + node.width / 2
        left += node.width + SPACE_X


def _left(group: list[Node]) -> float:
    return min(node.x - node.width / 2 for node in group)


def _right(group: list[Node]) -> float:
    return max(node.x + node.width / 2 for node in group)


# --- Drawing ----------------------------------------------------------------------------------------------------------


def _box(node: Node) -> str:
    left, top = node.x - node.width / 2, node.y - node.height / 2
    box = f'<rect x="{left:.0f}" y="{top:.0f}" width="{node.width:.0f}" height="{node.height:.0f}" rx="5"/>'
    lines = []
    for index, line in enumerate(node.lines):
        baseline = top + PADDING / 2 + LINE_HEIGHT * index + 15
        style = ' class="file"' if index else ""
        lines.append(f'<text x="{node.x:.0f}" y="{baseline:.0f}"{style}>{html.escape(line)}</text>')
    return box + "".join(lines)


def _edge(chart: Flowchart, parent: str, child: str) -> str:
    """A line with an arrow head, from the lower edge of a box to the upper edge of another."""
    start, end = chart.nodes[parent], chart.nodes[child]
    top, bottom = start.y + start.height / 2, end.y - end.height / 2
    middle = (top + bottom) / 2
    curve = f"C{start.x:.0f} {middle:.0f} {end.x:.0f} {middle:.0f} {end.x:.0f} {bottom:.0f}"
    head = "m-4 -7l4 7l4 -7"
    return f'<path d="M{start.x:.0f} {top:.0f}{curve}{head}"/>'


def _label(chart: Flowchart, parent: str, child: str) -> str:
    text = chart.labels[parent, child]
    start, end = chart.nodes[parent], chart.nodes[child]
    x, y = (start.x + end.x) / 2, (start.y + start.height / 2 + end.y - end.height / 2) / 2 + 5
    return f'<text x="{x:.0f}" y="{y:.0f}" class="edge">{html.escape(text)}</text>' if text else ""
