"""Makes the picture of what the main example prints anew (two minutes). Needs the extra `tests`.

python docs/images/make.py
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]

COMMAND = ["python", "examples/finetune_docstrings.py"]
COLUMNS = 160
# Rich's own has fonts from the network in it.
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>{styles} .{unique_id}-matrix {{ font: {char_height}px monospace; line-height: {line_height}px; }}</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
<g transform="translate(16, 16)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def main() -> None:
    """Run the example, and draw its last screen."""
    lines = screen(run_in_terminal([sys.executable, *COMMAND[1:]]))
    shown = [f"$ {' '.join(COMMAND)}", *lines]
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text("\n".join(shown).rstrip()))
    console.save_svg(str(ROOT / "docs/images/progress_bar.svg"), code_format=SVG)


def run_in_terminal(command: list[str]) -> str:
    """What a command writes to a terminal of `COLUMNS` columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    running = subprocess.Popen(command, cwd=ROOT, stdin=its, stdout=its, stderr=its)
    os.close(its)
    written = b""
    while True:
        try:
            written += os.read(ours, 1 << 16)
        except OSError:  # the terminal's last writer has left it
            break
    os.close(ours)
    if running.wait():
        raise RuntimeError(f"{command} failed:\n{written.decode()}")
    return written.decode()


def screen(printed: str) -> list[str]:
    """The lines that a terminal shows in the end."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", printed):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[A":
            row -= 1
        elif not part.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


if __name__ == "__main__":
    main()
