"""More projects: what they have in common is a step that does more than a forward and a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.projects.projects import EQUAL_BATCHES, NUM_SAMPLES

if TYPE_CHECKING:
    from tests.projects.harness import Run


def anomalib(run: Run) -> None:
    """A normalizing flow over features of a frozen network; batches are dataclasses that validate themselves."""
    from anomalib.models import Fastflow

    run.recorder.learning_rate = 1e-5
    images = Fastflow.configure_pre_processor(image_size=(64, 64))
    module = Fastflow(pre_trained=False, flow_steps=2, pre_processor=images, visualizer=False)
    _fit_images(run, module, run.strategy(count="samples"))


def anomalib_ganomaly(run: Run) -> None:
    """Two networks against each other, with batch normalization, under manual optimization."""
    from anomalib.models import Ganomaly

    run.recorder.keeps_optimizer = True
    module = Ganomaly(
        batch_size=run.batch_size,
        n_features=4,
        latent_vec_size=8,
        lr=1e-3,
        pre_processor=Ganomaly.configure_pre_processor(image_size=(32, 32)),
        visualizer=False,
    )
    _fit_images(run, module, run.strategy(**EQUAL_BATCHES, find_unused_parameters=True))


def _fit_images(run: Run, module: Any, strategy: Any) -> None:
    from anomalib.callbacks import ModelCheckpoint
    from anomalib.data import ImageBatch, ImageItem
    from anomalib.engine import Engine

    images = torch.rand(NUM_SAMPLES, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    is_damaged = torch.arange(NUM_SAMPLES) % 2 == 1
    masks = torch.zeros(NUM_SAMPLES, 64, 64)
    masks[is_damaged, :32] = 1
    items = [
        ImageItem(image=image, gt_label=label, gt_mask=mask)
        for image, label, mask in zip(images, is_damaged, masks, strict=True)
    ]
    loaders = [DataLoader(items, run.batch_size, collate_fn=ImageBatch.collate) for _ in range(2)]
    options = run.options(strategy, callbacks=run.callbacks(ModelCheckpoint))
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


def pina(run: Run) -> None:
    """A physics-informed network for an inverse problem, whose unknowns are in a dict of the problem."""
    from pina import Condition, LabelTensor, Trainer
    from pina.domain import CartesianDomain
    from pina.equation import Equation
    from pina.model import FeedForward
    from pina.operator import grad
    from pina.optim import TorchOptimizer
    from pina.problem import InverseProblem, SpatialProblem
    from pina.solver import PINN

    # Two batches for training, one for each of the others.
    points = torch.linspace(0, 1, 4 * NUM_SAMPLES).unsqueeze(1)

    def decay(inputs: Any, outputs: Any, unknown: dict[str, Tensor]) -> Any:
        slope = grad(outputs, inputs, components=["u"], d=["x"])
        return slope + unknown["rate"] * outputs.extract(["u"])

    class Decay(SpatialProblem, InverseProblem):
        output_variables = ["u"]  # noqa: RUF012
        spatial_domain = CartesianDomain({"x": [0, 1]})
        unknown_parameter_domain = CartesianDomain({"rate": [0, 2]})
        domains = {}  # noqa: RUF012
        conditions = {  # noqa: RUF012
            "D": Condition(input=LabelTensor(points, ["x"]), equation=Equation(decay)),
            "data": Condition(
                input=LabelTensor(points, ["x"]), target=LabelTensor(torch.exp(-1.3 * points), ["u"])
            ),
        }

    problem = Decay()
    problem.unknown_parameters["rate"] = torch.nn.Parameter(torch.tensor([0.3]))
    solver = PINN(
        problem,
        FeedForward(input_dimensions=1, output_dimensions=1, layers=[8, 8]),
        TorchOptimizer(torch.optim.SGD, lr=0.02, momentum=0.9),
    )
    run.recorder.keeps_optimizer = True
    options = run.options(run.strategy(**EQUAL_BATCHES))
    shares = {"train_size": 0.5, "val_size": 0.25, "test_size": 0.25}
    trainer = Trainer(solver, batch_size=run.batch_size // 2, **shares, shuffle=False, **options)
    solver.register_parameter("rate", problem.unknown_parameters["rate"])  # which Trainer(...) has made anew
    if run.loads:
        trainer.test(ckpt_path=run.ckpt_path, weights_only=False)
    else:
        trainer.train(ckpt_path=run.ckpt_path, weights_only=False)


def deeptab(run: Run) -> None:
    """A residual network over tables, by its module and its datamodule."""
    from deeptab.architectures.resnet import ResNet
    from deeptab.configs import ResNetConfig

    _fit_table(run, ResNet, ResNetConfig(layer_sizes=[8, 8], num_blocks=2, dropout=0.0))


def deeptab_tangos(run: Run) -> None:
    """A network over tables whose loss has a penalty on its Jacobian."""
    from deeptab.architectures.experimental.tangos import Tangos
    from deeptab.configs import TangosConfig

    _fit_table(run, Tangos, TangosConfig(layer_sizes=[8, 4], dropout=0.0, subsample=0))


def _fit_table(run: Run, architecture: type, config: Any) -> None:
    import pandas as pd
    from deeptab.configs import PreprocessingConfig
    from deeptab.core.preprocessing import build_preprocessor
    from deeptab.data import TabularDataModule
    from deeptab.training import TaskModel

    values = np.random.default_rng(0).normal(size=(NUM_SAMPLES, 3)).astype(np.float32)
    table = pd.DataFrame(values, columns=["a", "b", "c"])
    target = np.sin(values).sum(axis=1)
    data = TabularDataModule(
        build_preprocessor(
            PreprocessingConfig(numerical_preprocessing="standardization"), task="regression"
        ),
        batch_size=run.batch_size,
        shuffle=False,
        regression=True,
        X_val=table,
        y_val=target,
    )
    data.preprocess_data(table, target)
    data.setup("fit")
    loaders = data.train_dataloader(), data.val_dataloader()
    module = TaskModel(
        model_class=architecture,
        config=config,
        feature_information=(data.num_feature_info, data.cat_feature_info, data.embedding_feature_info),
        lr=0.02,
        lr_patience=10,
        lr_factor=0.1,
        weight_decay=0.0,
    )
    run.fit(module, *loaders, strategy=run.strategy(count_label_tokens=lambda batch: len(batch[1])))
