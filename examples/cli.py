"""The training of `finetune_docstrings.py` through LightningCLI, configured by a YAML file.

python examples/cli.py fit --config examples/configs/fsdp2.yaml     # the strategy by class_path and init_args
python examples/cli.py fit --config examples/configs/ddp.yaml       # the strategy by its registered name
python examples/cli.py fit --config examples/configs/fsdp2.yaml --trainer.strategy.data_parallel ddp
"""

import warnings

from docstring_writer import DocstringWriter
from docstrings import DocstringData
from lightning.pytorch.cli import LightningCLI

import lightning_automodel  # noqa: F401  (its import registers the strategy names)

# Encoding a few hundred bytes takes no time compared with training on them.
warnings.filterwarnings("ignore", ".*does not have many workers.*")

if __name__ == "__main__":
    LightningCLI(DocstringWriter, DocstringData, save_config_kwargs={"overwrite": True})
