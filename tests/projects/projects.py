"""The projects, each with data of its own making; a user's part is what is passed to `run.strategy`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer.exactness import full_weights

if TYPE_CHECKING:
    from tests.projects.harness import Run

NUM_SAMPLES = 16
SERIES_LENGTH = 24
WITHOUT_RESUMING = {"darts", "gluonts"}
"""Projects whose own `fit` takes no checkpoint of the Trainer's to resume from. gluonts does, but a resumed
run of ours draws what the stopped one would have drawn, and Lightning's does not."""

AS_DDP = {"gluonts"}
"""Projects that Lightning's ddp is the measure of: they draw random numbers as they train, one process others."""

RAGGED = {"anomalib", "torch_geometric", "webdataset"}
"""Projects with a count, by which micro-batches of unequal size are weighed; Lightning's ddp weighs them alike."""

EQUAL_BATCHES = {"per_token_loss": False}


class Supervised(LightningModule):
    """Validates and optimizes; for projects that ship layers or data alone."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=1, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.02)


def series(count: int = NUM_SAMPLES) -> np.ndarray:
    """[count, SERIES_LENGTH] sines of various phases."""
    steps = np.arange(SERIES_LENGTH) / 4
    return np.stack([np.sin(steps + phase) for phase in range(count)]).astype(np.float32)


def torch_geometric(run: Run) -> None:
    """Graph convolutions over batches of graphs, loaded by its datamodule."""
    from torch_geometric.data import Data
    from torch_geometric.data.lightning import LightningDataset
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Graphs(Supervised):
        def __init__(self) -> None:
            super().__init__()
            self.first = GCNConv(4, 8)
            self.second = GCNConv(8, 8)
            self.head = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = self.first(batch.x, batch.edge_index).relu()
            hidden = self.second(hidden, batch.edge_index).relu()
            found = self.head(global_mean_pool(hidden, batch.batch))[:, 0]
            return nn.functional.mse_loss(found, batch.y)

    def graph(i: int) -> Any:
        nodes = 3 + i % 5
        edges = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
        features = torch.randn(nodes, 4, generator=torch.Generator().manual_seed(i))
        return Data(x=features, edge_index=edges, y=torch.tensor([i / 10]))

    graphs = [graph(i) for i in range(NUM_SAMPLES)]
    data = LightningDataset(graphs, graphs, batch_size=run.batch_size, pin_memory=False)
    run.fit(
        Graphs(), datamodule=data, strategy=run.strategy(count_label_tokens=lambda batch: batch.num_graphs)
    )


def webdataset(run: Run) -> None:
    """A stream of tar files, split between ranks by itself."""
    import webdataset as wds

    class Classifier(Supervised):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    folder = Path(f"{run.directory}-{torch.distributed.get_rank()}")
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(4):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for i in range(4):
                values = np.random.default_rng(4 * shard + i).normal(size=4).astype(np.float32)
                writer.write({"__key__": f"{shard}{i}", "x.npy": values, "y.cls": (shard + i) % 3})

    urls = str(folder / "{0..3}.tar")
    split = wds.split_by_node if run.num_ranks > 1 else None
    loaders = [
        wds.WebLoader(
            wds.WebDataset(urls, shardshuffle=False, nodesplitter=split)
            .decode()
            .to_tuple("x.npy", "y.cls")
            .batched(run.batch_size),
            batch_size=None,
        )
        for _ in range(2)
    ]
    run.fit(Classifier(), *loaders, strategy=run.strategy(count_label_tokens=lambda batch: len(batch[1])))


def gluonts(run: Run) -> None:
    """Forecasts by a feed-forward network; loaders without length, windows at random."""
    from gluonts.dataset.common import ListDataset
    from gluonts.torch.model.simple_feedforward import SimpleFeedForwardEstimator

    if run.loads:
        run.recorder.after = torch.load(run.ckpt_path, weights_only=False)["state_dict"]
        return
    data = ListDataset([{"start": "2020-01-01", "target": row} for row in series()], freq="D")
    options = run.options(run.strategy(save_distributed_checkpoint=False, **EQUAL_BATCHES))
    estimator = SimpleFeedForwardEstimator(
        prediction_length=4,
        context_length=8,
        hidden_dimensions=[8],
        batch_size=run.batch_size,
        num_batches_per_epoch=2,
        trainer_kwargs=options,
    )
    estimator.train(data, data, ckpt_path=run.ckpt_path)


def darts(run: Run) -> None:
    """A recurrent forecaster; built on pytorch_lightning."""
    from darts import TimeSeries
    from darts.models import BlockRNNModel
    from darts.models.forecasting.block_rnn_model import _BlockRNNModule as BlockRNNModule

    if run.loads:
        run.recorder.after = full_weights(
            BlockRNNModule.load_from_checkpoint(run.ckpt_path, weights_only=False)
        )
        return
    data = [TimeSeries.from_values(row[:12]) for row in series()]
    model = BlockRNNModel(
        input_chunk_length=8,
        output_chunk_length=4,
        model="LSTM",
        hidden_dim=8,
        batch_size=run.batch_size,
        n_epochs=run.max_epochs,
        random_state=0,
        pl_trainer_kwargs=run.options(run.strategy(**EQUAL_BATCHES)),
    )
    model.fit(data, val_series=data, dataloader_kwargs={"shuffle": False}, verbose=False)


# --- Steps that do more than a forward and a loss ---------------------------------------------------------------------


def anomalib(run: Run) -> None:
    """A normalizing flow over features of a frozen network; batches are dataclasses that validate themselves."""
    from anomalib.callbacks import ModelCheckpoint
    from anomalib.data import ImageBatch, ImageItem
    from anomalib.engine import Engine
    from anomalib.models import Fastflow

    run.recorder.learning_rate = 1e-5
    images = Fastflow.configure_pre_processor(image_size=(64, 64))
    module = Fastflow(pre_trained=False, flow_steps=2, pre_processor=images, visualizer=False)
    images = torch.rand(NUM_SAMPLES, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    is_damaged = torch.arange(NUM_SAMPLES) % 2 == 1
    masks = torch.zeros(NUM_SAMPLES, 64, 64)
    masks[is_damaged, :32] = 1
    items = [
        ImageItem(image=image, gt_label=label, gt_mask=mask)
        for image, label, mask in zip(images, is_damaged, masks, strict=True)
    ]
    loaders = [DataLoader(items, run.batch_size, collate_fn=ImageBatch.collate) for _ in range(2)]
    options = run.options(run.strategy(count="samples"), callbacks=run.callbacks(ModelCheckpoint))
    # It numbers folders of its own in there, and ranks would meet.
    engine = Engine(**{**options, "default_root_dir": f"{run.directory}-{torch.distributed.get_rank()}"})
    if run.loads:
        engine.validate(module, dataloaders=loaders[1], ckpt_path=run.ckpt_path)
    else:
        engine.fit(module, *loaders, ckpt_path=run.ckpt_path)


def nequip(run: Run) -> None:
    """Energies of molecules and their forces, which are gradients; the loss is already one over all ranks."""
    from nequip.data import AtomicDataDict, from_dict
    from nequip.data.transforms import NeighborListTransform
    from nequip.train import NequIPLightningModule
    from nequip.utils.global_state import set_global_state

    set_global_state()
    neighbours = NeighborListTransform(r_max=4.0)

    def molecule(number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        num_atoms = 3 + number % 3
        return neighbours(
            from_dict(
                {
                    "pos": 1.5 * torch.randn(num_atoms, 3, generator=generator),
                    "atom_types": torch.arange(num_atoms) % 2,
                    "total_energy": torch.randn(1, 1, generator=generator),
                    "forces": torch.randn(num_atoms, 3, generator=generator),
                }
            )
        )

    module = NequIPLightningModule(
        model={
            "_target_": "nequip.model.NequIPGNNModel",
            "seed": 0,
            "model_dtype": "float32",
            "r_max": 4.0,
            "type_names": ["C", "H"],
            "num_layers": 2,
            "l_max": 1,
            "num_features": 4,
            "radial_mlp_width": 8,
            "avg_num_neighbors": 3.0,
        },
        num_datasets={"train": 1, "val": 1, "test": 0, "predict": 0},
        loss={"_target_": "nequip.train.EnergyForceLoss"},
        val_metrics={"_target_": "nequip.train.EnergyForceMetrics"},
    )
    module.world_size = run.num_ranks  # as nequip's own script sets it
    batches = {"collate_fn": AtomicDataDict.batched_from_list, "batch_size": run.batch_size}
    loaders = [DataLoader([molecule(number) for number in range(NUM_SAMPLES)], **batches) for _ in range(2)]
    run.fit(module, *loaders, strategy=run.strategy(**EQUAL_BATCHES))
