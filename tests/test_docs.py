"""README and the documentation site: the code runs, lists are complete, the site builds strictly."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

import lightning_automodel
from lightning_automodel import AutomodelStrategy, destroy_global_state
from tests.doc_blocks import PAGES, blocks, run_page, undefined_names, unknown_keywords
from tests.processes import ROOT

DOCS = ROOT / "docs"
sys.path.append(str(DOCS))
from diagrams import svg_of  # noqa: E402

MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
WITH_PYTHON = [page for page in PAGES if blocks(page, "python", "diff")]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyword arguments are real; what can run in one process runs."""
    monkeypatch.chdir(tmp_path)
    try:
        namespace = run_page(page, monkeypatch)
    finally:
        destroy_global_state()
    assert [
        found for block in blocks(page, "python", "diff") for found in unknown_keywords(block, namespace)
    ] == []


def test_names(tmp_path: Path) -> None:
    assert undefined_names(tmp_path) == "All checks passed!\n"


def test_commands() -> None:
    """Scripts and modules that are called exist, and have the options that they get."""
    sources = {
        f"lightning_automodel.{room}": "\n".join(
            path.read_text() for path in (ROOT / "lightning_automodel" / room).rglob("*.py")
        )
        for room in ("checkpoint", "plan")
    }
    called = 0
    missing = []
    for page in PAGES:
        for line in (line for block in blocks(page, "bash") for line in block.text.splitlines()):
            words = shlex.split(line, comments=True)
            for name in (
                word
                for word in words
                if re.fullmatch(r"(examples|benchmarks)/\S+\.py|lightning_automodel\.\S+", word)
            ):
                source = sources.get(name) or (ROOT / name).read_text()
                given = [word.split("=")[0] for word in words[words.index(name) :] if word.startswith("--")]
                called += 1
                missing += [
                    (page.name, name, option)
                    for option in given
                    if f'"{option}"' not in source and "LightningCLI(" not in source
                ]
    assert missing == []
    assert called > 10


# --- Lists that are complete ------------------------------------------------------------------------------------------


def test_api_has_every_name_and_option() -> None:
    """Each public name in the reference, each option in one group and in an example."""
    text = (DOCS / "api.md").read_text()
    directives = re.findall(r"^::: lightning_automodel\.(\w+)$", text, flags=re.M)
    assert set(directives) >= set(lightning_automodel.__all__)
    options = re.findall(r"`(\w+)`", " ".join(re.findall(r"^Options: (.*?)\n\n", text, flags=re.M | re.S)))
    assert sorted(options) == sorted(inspect.signature(AutomodelStrategy).parameters)
    shown = "\n".join(block.text for block in blocks(DOCS / "api.md", "python"))
    assert [option for option in options if f"{option}=" not in shown] == []


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDPStrategy, ModelParallelStrategy])
def test_coming_from_has_every_option(strategy: type) -> None:
    """Of the installed Lightning, in the order of its signature."""
    parameters = list(inspect.signature(strategy).parameters.values())
    names = [f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name for p in parameters]
    assert first_column(DOCS / "coming_from.md", f"| `{strategy.__name__}` |") == names


def test_coming_from_names_real_arguments() -> None:
    """Of torch and transformers, and of accelerate where it is installed."""
    training_arguments = pytest.importorskip("transformers").TrainingArguments
    assert_known("`**kwargs`, for `FullyShardedDataParallel`", FullyShardedDataParallel)
    assert_known("`TrainingArguments`", training_arguments)
    assert_known("`Accelerator`", pytest.importorskip("accelerate").Accelerator)
    assert set(first_column(DOCS / "coming_from.md", "| function |")) <= set(lightning_automodel.__all__)


def assert_known(title: str, function: Any) -> None:
    told = set(first_column(DOCS / "coming_from.md", f"| {title} |"))
    assert told
    assert told - set(inspect.signature(function).parameters) == set()


def first_column(page: Path, header: str) -> list[str]:
    """Names in backticks in the first column of the table with this header."""
    lines = page.read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(header)) + 2
    end = next(index for index in range(start, len(lines)) if not lines[index].startswith("|"))
    return [name for line in lines[start:end] for name in re.findall(r"`([^`]+)`", line.split("|")[1])]


def test_llms_txt_lists_every_page() -> None:
    """A line for each page of the navigation, with its title."""
    pages = re.findall(r"^ +- (.+): (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M)
    listed = re.findall(r"^- \[(.+)\]\((\w+\.md)\): \S", (DOCS / "llms.txt").read_text(), flags=re.M)
    assert listed == pages
    assert {name for _, name in pages} == {page.name for page in DOCS.glob("*.md")}


# --- Launchers --------------------------------------------------------------------------------------------------------


def test_slurm_script(tmp_path: Path) -> None:
    """It parses, and its numbers are those that the Trainer is told."""
    script = next(block.text for block in blocks(DOCS / "launchers.md", "bash") if "#SBATCH" in block.text)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, flags=re.M))
    variables = {"SLURM_NTASKS_PER_NODE": options["ntasks-per-node"], "SLURM_NNODES": options["nodes"]}
    told = subprocess.run(
        ["bash", "-c", re.sub("^srun .*", 'echo "$DEVICES $NUM_NODES"', script, flags=re.M)],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told.split() == [options["ntasks-per-node"], options["nodes"]]


def test_kubernetes_manifest() -> None:
    """Service and Job belong together, and torchrun understands the command of each pod."""
    from torch.distributed.run import parse_args

    service, job = yaml.safe_load_all(blocks(DOCS / "launchers.md", "yaml")[0].text)
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    words = shlex.split(container["args"][0].replace("$JOB_COMPLETION_INDEX", "1"))
    arguments = parse_args(words[words.index("torchrun") + 1 :])
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (arguments.nnodes, arguments.nproc_per_node) == (variables["NUM_NODES"], variables["DEVICES"])
    assert int(arguments.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert (arguments.node_rank, arguments.master_port) == (1, 29500)
    assert arguments.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def test_diagrams() -> None:
    """Each has a text for those who do not see it, and all boxes; a repeated one is the same."""
    charts = MERMAID.findall((DOCS / "how_it_works.md").read_text())
    assert len(charts) == 2
    assert set(MERMAID.findall((ROOT / "CONTRIBUTING.md").read_text())) <= set(charts)
    charts = [block for page in PAGES for block in MERMAID.findall(page.read_text())]
    for number, block in enumerate(charts):
        picture = xml.etree.ElementTree.fromstring(svg_of(block, number))
        title = picture[0]
        description = picture[1]
        assert picture.attrib["aria-labelledby"] == f"{title.attrib['id']} {description.attrib['id']}"
        assert title.text
        assert description.text
        assert len(picture.findall("{*}rect")) == len(re.findall(r'\["', block))
