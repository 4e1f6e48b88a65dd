"""The strategy: its hooks in the order in which the Trainer calls them; each delegates to the module that does it.

=====================  ======================================================  =====================================
state                  meaning                                                 from, until
=====================  ======================================================  =====================================
``_options``           the keywords                                            creation, for good
``_advice``            what has been told: each thing is told once             creation, for good
``_saver``             writes checkpoints; a save may be in flight             creation, for good
``_supervisor``        starts and ends ranks together; knows of failures       creation, for good
``_layer_sync``        of ``Trainer(sync_batchnorm=True)``, else None          the Trainer's creation, for good
``_mesh``              the ranks and their groups                              ``setup_environment``, the next one
``_barriers``          names of the barriers that this rank has reached        ``setup_environment``, the next one
``_setup_block``       ``first_rank_setup``                                    "pre_setup", "post_setup"
``_trainer``           whose run it is                                         ``setup``, ``teardown``
``_patches``           on the Trainer, its callbacks and the module            "pre_setup", ``teardown``
``_run``               the distributed model and what trains it                ``setup``, the next run: ``last_step``
                                                                               reads it after ``teardown``
``_resume``            of a fit: what its checkpoints need to go on exactly    ``setup``, ``teardown``
``_ended_fit``         where the last fit has ended, for later saves           ``teardown``, the next fit
``_loader``            the checkpoint that Lightning restores                  ``load_checkpoint``, "run-stage"
``_stops``             whether all ranks stop where this window ends           one training step
=====================  ======================================================  =====================================
"""

import itertools
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_automodel.advice import Advice, stop_iteration_error, summary
from lightning_automodel.checkpoint.loading import CheckpointLoader
from lightning_automodel.checkpoint.optimizers import NamedOptimizer
from lightning_automodel.checkpoint.saving import CheckpointSaver
from lightning_automodel.data.samplers import Ranks, check_counted_ranks
from lightning_automodel.distributed import collectives, process_group
from lightning_automodel.distributed.failures import RankFailedError
from lightning_automodel.distributed.first_rank import FirstRankPerNode
from lightning_automodel.distributed.mesh import Placement, RunMesh, adopt_mesh, build_mesh, resolve_sizes
from lightning_automodel.distributed_module import RunConfig
from lightning_automodel.failure.coordinated_stop import REQUEUE
from lightning_automodel.failure.supervisor import Supervisor
from lightning_automodel.gradients.token_loss import StepReport
from lightning_automodel.gradients.window_records import unwrap
from lightning_automodel.internals import lightning as lightning_internals
from lightning_automodel.internals.patching import PatchStack
from lightning_automodel.internals.releases import warn_untested
from lightning_automodel.launch.launchers import make_launcher
from lightning_automodel.options import StrategyOptions
from lightning_automodel.resume.fit import CHECKPOINT_KEY, Resume
from lightning_automodel.resume.loops import is_last_batch
from lightning_automodel.sharding import checks, meta_init, weight_averaging
from lightning_automodel.sharding.tensor_parallel import check_ties
from lightning_automodel.training_run import TrainingRun

_TIME_TO_MEET_AFTER_A_STOP = timedelta(seconds=15)


class AutomodelStrategy(ParallelStrategy):
    """Trains any LightningModule sharded (FSDP2) or replicated (DDP) with the gradients of one single-process batch.

    Each optimizer step follows the gradient of the mean loss per label token over all micro-batches of the
    window and all data-parallel ranks, however unequal they are. ``rescale_gradients`` has the algebra.

    Args:
        data_parallel: ``"fsdp2"`` shards parameters, gradients and optimizer state; ``"ddp"`` copies them.
        data_parallel_size: Size of the data-parallel group (replicate x shard). ``"auto"``: the world size.
        data_parallel_replicate_size: More than 1 is HSDP: that many replicas, each sharded over the ranks of
            one. ``"auto"``: the number of nodes.
        tensor_parallel_size: Ranks that compute each micro-batch together, by the plan that
            ``configure_model`` applies over ``self.device_mesh["tensor_parallel"]``, or by a Hugging Face
            model's own ``tp_plan``.
        context_parallel_size: Ranks that share each batch and hold a slice of its sequence each. Their
            attention is ``context_parallel_attention``.
        expert_parallel_size: Ranks, of those that parameters are sharded over, that each hold other experts
            of a mixture of experts. Their parameters are spread by a Hugging Face model's own ``ep_plan``,
            or by ``spread_experts`` over ``self.device_mesh["expert_parallel"]`` in ``configure_model``.
        device_mesh: A mesh over all ranks that the caller built; the sizes are read from it. Its dimensions
            are called ``dp`` or ``dp_replicate`` and ``dp_shard``, ``tp``, or as this strategy calls them.
        ddp_kwargs: For ``DistributedDataParallel`` (``find_unused_parameters``, ``bucket_cap_mb``, ...).
        ddp_comm_hook: Reduces gradients instead of an all-reduce, as in ``DDPStrategy``. Needs
            ``count_window_ahead``.
        ddp_comm_state: First argument of the hook.
        ddp_comm_wrapper: Takes the hook and returns the one to use, such as ``fp16_compress_wrapper``.
        per_token_loss: False weighs every micro-batch the same, so that no count is needed.
        loss_reduction: Whether ``training_step`` returns the mean over its label tokens, or their sum.
        label_key: Key of the labels in a batch that is a mapping.
        ignore_index: Label value of positions that the loss ignores.
        label_shift: Leading label positions per row that the loss drops; 1 for Hugging Face causal models.
        count_label_tokens: ``batch -> int | Tensor``, the number of label tokens.
        count: ``"samples"`` counts the rows that all tensors of a batch have, for classifiers with ``(x,
            y)``. None and ``"tokens"`` count label tokens, in one of the other ways.
        defer_fsdp_grad_sync: When FSDP2 reduces gradients. True: once per window, until which they are kept
            unsharded. False: after each micro-batch, which takes less memory. ``"all_reduce"``: with
            replicas, reduce-scatter each time and all-reduce once. ``"auto"``: True if an estimate says that
            a window's gradients fit on every rank, else False; ``describe()`` has it.
        reshard_during_accumulation: False keeps parameters gathered for a whole window; under manual
            optimization from a forward to the end of a backward, or to a step. ``"auto"``: if an estimate
            says that they fit, and never under manual optimization; ``describe()`` has it.
        auto_wrap_policy: Classes whose outermost instances become FSDP units, or a predicate on modules.
            None: the outermost repeated blocks.
        reshard_after_forward: Whether FSDP units free their parameters between forward and backward, if they
            do not stay gathered for the window; or the size of the group to reshard to.
        mp_policy: The dtypes that FSDP2 units compute and reduce in, instead of those of
            ``Trainer(precision=...)``. ``output_dtype`` is the dtype of what modules return to the
            LightningModule's own code.
        cpu_offload: Keep shards and optimizer state in host memory.
        activation_checkpointing: Compute activations again in the backward instead of keeping them. True:
            those of each FSDP unit (``auto_wrap_policy``), or of the same modules under DDP. A set: those of
            the outermost instances of these classes. ``"selective"`` keeps the results of attention and of
            every second matrix product; a policy of ``torch.utils.checkpoint`` keeps what it names.
            ``"offload"``: as True, with the inputs of these modules in host memory until the backward.
        compile: Compile each FSDP unit (``auto_wrap_policy``), or the same modules under DDP. A dictionary:
            keywords of ``torch.compile``.
        prefetch: How many FSDP units ahead all-gathers start, in the forward and in the backward; each takes
            the memory of one more gathered unit. 0: what FSDP2 does by itself. ``"auto"``: 1 on a CPU,
            elsewhere 0.
        optimizer_step: Where sharded parameters are stepped. ``"shards"``: on every rank's shards, where every
            optimizer is right. ``"whole"``: each parameter on one rank, its owner, which gets its
            gradient and weights and sends the new weights back; for optimizers that step each parameter
            by itself. ``"auto"``: whole for optimizers that are known to work on whole matrices (Muon,
            Shampoo, SOAP), else on shards. A group of parameters may have a key ``"optimizer_step"`` of
            its own.
        track_grad_norm: Compute ``last_step.grad_norm`` even if nothing else needs it.
        error_if_nonfinite: Raise on every rank, before any parameter changes, when the gradient norm is not
            finite. Reads one number on the host each step.
        process_group_backend: Backend of the default process group. None: gloo for CPU, nccl for CUDA.
        init_method: Where ranks meet: ``"tcp://host:port"``, ``"file:///path"``. None: see the environment.
        start_method: How the ranks of a node are started, if no launcher has started them. ``"popen"``: this
            process is rank 0 and runs the script again for each other rank. ``"fork"``, also in notebooks:
            as workers with one CPU thread each, from which weights and metrics come back.
        timeout: How long a collective may wait: ``timedelta`` or minutes.
        heartbeat_timeout: How long a rank may miss its heartbeats, if that is less than ``timeout``:
            ``timedelta`` or minutes. A thread sends them, which a debugger that stops all threads, or an
            extension that keeps Python's lock, stops too.
        first_rank_setup: Run the ``setup`` hooks on the first rank of each node before the others.
        save_distributed_checkpoint: True: a checkpoint is a directory of shards. False: one file, for which
            rank 0 needs host memory for the whole state. None: a directory if the model is sharded over
            several ranks, and the Trainer has no ``CheckpointIO`` plugin (but Lightning's own).
        uneven_inputs: What happens if a rank's training data, from samplers or streams of your own, ends
            before another's. ``"error"``: every rank raises. ``"pad"``: it goes on with padding batches,
            whose losses have no weight, until all have ended (docs/unequal_data.md says what else counts).
            With the Trainer's sampler, and in evaluation and prediction, each sample counts once either way.
        count_window_ahead: Draw and count the batches of a window before its first forward, so that each
            loss is weighed before its backward: for ``"aux_loss"`` in the output of ``training_step``, for
            gradient hooks that step during backward (FSDP2 only), and for the range of half-precision
            gradients. Another returned ``num_label_tokens`` raises. A window's batches are held in host
            memory, and random numbers drawn in the main process come in another order.
        async_checkpoint: Write checkpoints while training goes on, after the state was copied to host
            memory. A failure is raised in the next step, and a run ends when its last checkpoint is on disk.
        accelerator: As in Lightning's strategies, like the four that follow; the Trainer gives what is None.
        parallel_devices: Devices of this node's ranks.
        cluster_environment: Which rank this process is, and who starts the others.
        checkpoint_io: Writes and reads checkpoints of one file.
        precision_plugin: The dtypes, instead of ``Trainer(precision=...)``.

    Raises:
        ValueError: If an option is out of range; the message gives the valid values.
        TypeError: If an option has the wrong type.

    Examples:
        >>> trainer = pl.Trainer(strategy=AutomodelStrategy(), accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        *,
        data_parallel: Literal["fsdp2", "ddp"] = "fsdp2",
        data_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_replicate_size: int | Literal["auto"] = 1,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        device_mesh: DeviceMesh | None = None,
        ddp_kwargs: dict[str, Any] | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        per_token_loss: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        label_key: str = "labels",
        ignore_index: int = -100,
        label_shift: int = 0,
        count_label_tokens: Callable[..., Any] | None = None,
        count: Literal["tokens", "samples"] | None = None,
        defer_fsdp_grad_sync: bool | Literal["all_reduce", "auto"] = "auto",
        reshard_during_accumulation: bool | Literal["auto"] = "auto",
        auto_wrap_policy: set[type[Module]] | Callable[..., Any] | None = None,
        reshard_after_forward: bool | int = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        activation_checkpointing: (
            bool | set[type[Module]] | Literal["selective", "offload"] | Callable[..., Any]
        ) = False,
        compile: bool | dict[str, Any] = False,
        prefetch: int | Literal["auto"] = "auto",
        optimizer_step: Literal["auto", "shards", "whole"] = "auto",
        track_grad_norm: bool = False,
        error_if_nonfinite: bool = False,
        process_group_backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | float = 30,
        heartbeat_timeout: timedelta | float = 2,
        start_method: Literal["popen", "fork"] = "popen",
        first_rank_setup: bool = False,
        save_distributed_checkpoint: bool | None = None,
        uneven_inputs: Literal["error", "pad"] = "error",
        count_window_ahead: bool = False,
        async_checkpoint: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        keywords = locals()  # those of this function, which are written out for editors
        options = StrategyOptions(**{field.name: keywords[field.name] for field in fields(StrategyOptions)})
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._options = options
        self.num_nodes = 1
        self._advice = Advice()
        self._saver = CheckpointSaver(options)
        self._supervisor = Supervisor(self._join, self._saver.wait_for_pending_save)
        self._layer_sync: LayerSync | None = None
        self._patches = PatchStack()
        self._trainer: pl.Trainer | None = None
        self._resume: Resume | None = None
        self._setup_block = ExitStack()
        self._loader = CheckpointLoader()
        self._mesh: RunMesh | None = None
        self._barriers: set[str | None] = set()
        self._run: TrainingRun | None = None
        self._ended_fit: Resume | None = None
        self._stops = False

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        presets: dict[str, dict[str, Any]] = {
            "automodel": {},
            "automodel_fsdp2": {"data_parallel": "fsdp2"},
            "automodel_ddp": {"data_parallel": "ddp"},
            "automodel_hsdp": {"data_parallel_replicate_size": "auto"},
            "automodel_fsdp2_offload": {"cpu_offload": True},
        }
        for name, keywords in presets.items():
            arguments = ", ".join(f"{keyword}={value!r}" for keyword, value in keywords.items())
            description = f"AutomodelStrategy({arguments})"
            strategy_registry.register(name, cls, description, override=True, **keywords)

    def __repr__(self) -> str:
        # ``pytorch_lightning``'s own Trainer and Fabric show this when they refuse the strategy.
        return f"<{type(self).__name__}, for lightning.pytorch.Trainer alone>"

    # --- What the Trainer asks before it starts -----------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """True: without it, Lightning gives every rank the same data."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        return cast(list[torch.device], self.parallel_devices)[self.local_rank]

    @property
    def strategy_name(self) -> str:
        """The name under which the engine's defaults are registered: ``"automodel_fsdp2"`` or ``"automodel_ddp"``."""
        return f"automodel_{self.data_parallel}"

    @property
    def data_parallel(self) -> Literal["fsdp2", "ddp"]:
        """The engine: sharded or replicated."""
        return self._options.data_parallel

    @property
    def last_step(self) -> StepReport | None:
        """Report on the newest optimizer step, with tensors on the device; None before the first.

        Always None in a process that started the ranks as workers.
        """
        if self._run is None:
            return None
        return self._run.windows.last_step

    @property
    def is_filler(self) -> bool:
        """Whether the newest training batch is padding without effect (``uneven_inputs="pad"``), for own counters."""
        return self._run is not None and self._run.inputs.is_filler

    @property
    def seconds_drawing(self) -> float:
        """Seconds of this fit in which ``count_window_ahead`` has drawn batches ahead."""
        return 0.0 if self._run is None else self._run.inputs.seconds_drawing

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        if self.parallel_devices is not None:
            return len(self.parallel_devices)
        return 0

    @property
    def process_group_backend(self) -> str:
        """Backend of the default process group."""
        return process_group.choose_backend(
            self.root_device, self._options.process_group_backend, self._options.cpu_offload
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """Mesh of the run, for ``configure_model``; RuntimeError before the processes have joined."""
        return self._joined_mesh.mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        mesh = self._joined_mesh.data_parallel
        return {"num_replicas": Ranks(mesh.size()), "rank": mesh.get_local_rank()}

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Context in which ``configure_model`` and ``trainer.init_module()`` create tensors on this rank's device.

        ``empty_init=True`` creates them on the meta device; set-up initialises each rank's shards. ValueError if
        a plan has torn apart what shared a parameter.
        """
        module = self.lightning_module or torch.nn.Module()
        before = dict(module.named_parameters(remove_duplicate=False))
        with (
            super().tensor_init_context(empty_init=False),
            torch.device("meta") if empty_init else nullcontext(),
        ):
            yield
        check_ties(before, dict(module.named_parameters(remove_duplicate=False)))

    @property
    def _joined_mesh(self) -> RunMesh:
        if self._mesh is None:
            raise RuntimeError(
                f"{type(self).__name__}.device_mesh exists once the processes have joined: use it from"
                " configure_model() on, not before."
            )
        return self._mesh

    # --- Joining ------------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        start_method = self._options.start_method
        environment = self.cluster_environment
        self._launcher = make_launcher(
            self, start_method, self.num_processes, self.num_nodes, self._supervisor
        )
        if environment is not None and environment.creates_processes_externally and start_method != "popen":
            self._advice.say_once(
                f"start_method={start_method!r} has no effect: {type(environment).__name__} says that"
                " something else has started the processes."
            )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero helpers which rank this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _join(self) -> None:
        self._check_existing_group()
        super().setup_environment()
        self.set_world_ranks()
        timeout = self._options.parsed_timeout
        process_group.join_process_group(
            cast(ClusterEnvironment, self.cluster_environment),
            self.process_group_backend,
            timeout,
            self._options.init_method,
            self._supervisor.check_processes,
            partial(
                self._supervisor.start_watch,
                timeout=timeout,
                heartbeat_timeout=self._options.parsed_heartbeat_timeout,
                where=self._where,
            ),
        )

    def _check_existing_group(self) -> None:
        asked = self.num_nodes * self.num_processes
        size = process_group.group_size()
        if dist.is_initialized() and size != asked:
            raise ValueError(
                f"The process group that exists has {size} ranks, and the Trainer asks for {asked} (devices x"
                " num_nodes). Pass Trainer the devices and nodes of the group, or leave the group first, on all ranks:"
                " destroy_global_state(), or torch.distributed.destroy_process_group() if your own code has made it."
            )

    @override
    def setup_environment(self) -> None:
        """Make the mesh. The supervisor has joined the ranks before, so that they hear of ``configure_callbacks``."""
        timeout = self._options.parsed_timeout
        self._barriers.clear()
        self._close_run()  # if an `on_exception` hook raised, Lightning did not tear down the last run
        self._run = None  # no hook before `setup` may take the last run for its own
        collectives.host_group(timeout)
        self._mesh = self._make_mesh(timeout)
        if self.lightning_module is not None:  # a plain script may start the launcher by itself
            lightning_internals.set_device_mesh(self.lightning_module, self._mesh.mesh)
            lightning_internals.forget_hook(self.lightning_module)

    def _make_mesh(self, timeout: timedelta) -> RunMesh:
        options = self._options
        device_type = self.root_device.type
        if options.device_mesh is not None:
            return adopt_mesh(
                options.device_mesh, device_type, options.data_parallel, options.sizes(given=True)
            )
        sizes = resolve_sizes(
            data_parallel=options.data_parallel,
            world_size=self.world_size,
            num_nodes=self.num_nodes,
            **options.sizes(),
        )
        return build_mesh(device_type, sizes, timeout)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank, on the host; a collective. If ranks are missing, the error names them and the barrier.

        Once a rank has failed, no rank waits: they leave one by one. The Trainer calls ``"pre_setup"`` and
        ``"post_setup"`` around the ``setup`` hooks, and ``"run-stage"`` once checkpoints are loaded; no hook
        comes there.
        """
        self._barriers.add(name)
        if name == "post_setup":
            self._setup_block.close()
        if self._supervisor.has_failed:
            return
        collectives.gathers.check()
        collectives.named_barrier(name or "unnamed", self._options.parsed_timeout)
        if name == "pre_setup":
            self._prepare_setup_hooks()
        elif name == "run-stage" and self._run is not None:
            self._end_restoring()

    def _prepare_setup_hooks(self) -> None:
        """Refuse callbacks that cannot work, delay weight averaging, and begin the block of ``first_rank_setup``."""
        module = self.lightning_module
        if module is not None:
            checks.check_callbacks(module.trainer.callbacks, self._options.is_sharded)  # type: ignore[attr-defined]
            weight_averaging.delay_setup(module, self._patches)
        if self._options.first_rank_setup:
            self._setup_block.enter_context(self.first_rank_per_node())

    def _end_restoring(self) -> None:
        """Lightning has restored the checkpoint, if there is one: check that all parameters have values."""
        meta_init.check_initialized(self._module, self.root_device)
        self._loader = CheckpointLoader()

    def _expect_barriers(self, *names: str) -> None:
        """Raise RuntimeError unless these have come: what is done there would be left out in silence.

        Not asked for "run-stage" in a fit: LearningRateFinder runs its loops before it.
        """
        if missing := [name for name in names if name not in self._barriers]:
            raise RuntimeError(
                f"Lightning {pl.__version__} has not called strategy.barrier({missing[0]!r}), on which"
                f" {type(self).__name__} relies: install a version that docs/support.md lists."
            )

    def first_rank_per_node(
        self, scope: Literal["node", "global"] = "node", timeout: timedelta | float | None = None
    ) -> FirstRankPerNode:
        """A block that the first rank of each node runs before the others; see ``FirstRankPerNode``.

        Args:
            scope: ``"node"`` if each node has its own disk, ``"global"`` for a shared file system.
            timeout: Within which all ranks must enter the block. None: the strategy's timeout.
        """
        return FirstRankPerNode(scope=scope, timeout=self._options.timeout if timeout is None else timeout)

    def _where(self) -> str:
        """The hook that this rank is in, or the stage between hooks."""
        module = self.lightning_module
        if module is None:
            return "set-up"
        stage = None
        if self._trainer is not None:
            stage = self._trainer.state.stage or self._trainer.state.fn
        return lightning_internals.current_hook(module) or (stage.value if stage is not None else "set-up")

    # --- Setting up ---------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        warn_untested()
        self._expect_barriers("pre_setup", "post_setup")
        if fitting:
            self._ended_fit = None
        if self._supervisor.watch is not None:
            # All ranks decide alike where Lightning lets each decide by its own signals.
            ask_to_requeue = partial(self._supervisor.watch.stop.ask, REQUEUE)
            lightning_internals.patch_signals(trainer, ask_to_requeue, self._patches)
        self._saver.choose_form(self.checkpoint_io, self.world_size)
        self._saver.patch_callbacks(trainer, self._patches)
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        self._start_run(trainer)
        if fitting:
            self._make_resumable()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._required_run.patch_plugin()
        if fitting:
            self._required_run.move_optimizer_states(self.optimizers)
        self._advice.say_once(summary(self.describe()), say=rank_zero_info)

    def _start_run(self, trainer: "pl.Trainer") -> None:
        """Distribute the module. A collective over the world."""
        module = self._module
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync is not None:
            self._layer_sync.apply(module)
        host_group = collectives.host_group(self._options.parsed_timeout)
        placement = Placement(self._joined_mesh, self.root_device, self.num_processes, host_group)
        config = RunConfig(module, self._options, placement, self.precision_plugin, self._advice)
        self._run = TrainingRun(config, self._patches)
        self.model = self._run.distributed.model
        weight_averaging.set_up(module)

    def _make_resumable(self) -> None:
        """Record during a fit what its checkpoints need, so that a resumed one goes on bit for bit."""
        module = self._module
        run = self._required_run
        self._resume = Resume(run, self._patches)
        run.windows.on_step = self._reach_resumable_point
        zero_grad = module.on_validation_model_zero_grad

        def stop_or_zero_grad() -> None:
            self._stop_before_validation()
            run.zero_before_validation(zero_grad)

        self._patches.set(module, "on_validation_model_zero_grad", stop_or_zero_grad)

    @override
    def model_to_device(self) -> None:
        """Do nothing: ``TrainingRun`` moves the model, since shards may stay on the host or have no values yet."""

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        self.optimizers = []
        self.lr_scheduler_configs = []
        super().setup_optimizers(trainer)
        self._required_run.take_optimizers(self.optimizers)

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        Strategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if self._run is not None:
            wrappers = self._module.optimizers()
            self._run.steps.watch(super().optimizers, wrappers if isinstance(wrappers, list) else [wrappers])

    @property
    def _required_run(self) -> TrainingRun:
        if self._run is None:
            raise RuntimeError(
                f"{type(self).__name__} has no run yet: the Trainer starts one in fit, validate, test and"
                " predict."
            )
        return self._run

    @property
    def _module(self) -> "pl.LightningModule":
        return cast(pl.LightningModule, self.lightning_module)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._run is None:
            raise RuntimeError(
                "A hook before the run loads data, as trainer.estimated_stepping_batches does in setup: take"
                " it in configure_optimizers or on_fit_start."
            )
        ranks = self.distributed_sampler_kwargs
        check_counted_ranks(dataloader, ranks["rank"], ranks["num_replicas"])
        processed = self._run.loaders.process(dataloader)
        if self._resume is not None:
            self._resume.loaders.take(processed)
        return processed

    # --- One micro-batch ----------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        checks.check_validation_interval(self._module.trainer)
        self._required_run.windows.reset()
        self._required_run.patch_metrics_of_peers()  # a resumed epoch may have no first batch
        if self._resume is not None:
            self._resume.on_train_start()

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if self._run is not None:
            self._run.inputs.batch_comes()
        try:
            return super().batch_to_device(batch, device, dataloader_idx)
        except StopIteration as error:
            if self.world_size == 1:
                raise
            raise stop_iteration_error("A hook of the transfer of a batch") from error

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._take_module_back()
        if batch_idx == 0:
            self._required_run.patch_metrics_of_peers()
        self._required_run.inputs.begin_training_batch()

    def _take_module_back(self) -> None:
        """Let the module belong to this run's Trainer again: a hook may have let another one evaluate it."""
        if self._module.trainer is not self._trainer:
            self._module.trainer = self._trainer

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        trainer = self._module.trainer
        self._stops = self._begin_step(trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        run = self._required_run
        if not run.windows.open_windows:
            run.distributed.check_parameters()
        if is_last_batch(trainer):
            run.patch_metrics()  # before Lightning computes those that were logged over the epoch
        output = run.micro_batches.training_step(super().training_step, args, kwargs)
        stops_by_hand = self._stops and not self._module.automatic_optimization
        # Gradients that wait for a step by hand would be lost, unless an epoch ends, which loses them anyway.
        if stops_by_hand and (is_last_batch(trainer) or not run.holds_gradients()):
            self._reach_resumable_point()
        return output

    def _begin_step(self, training_step: int | None) -> bool:
        """Raise what a save in the background has raised, and return whether all ranks stop after this step.

        It has a number in training.
        """
        self._saver.poll()
        watch = self._supervisor.watch
        return watch is not None and watch.begin_step(training_step)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Context for every micro-batch of a window but the last."""
        with self._required_run.micro_batches.before_the_last():
            yield

    @override
    def backward(  # type: ignore[override]  # Lightning passes both by position; a keyword `optimizer` is the user's
        self, closure_loss: Tensor, optimizer: Optimizer | None, /, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Backpropagate one micro-batch as a sum of token losses. After a window's last one, gradients are final.

        Outside of ``block_backward_sync`` it is a collective, with one all-reduce over the data-parallel
        ranks in addition to those of the engine. If a rank fails, the others raise. Returns the same loss.
        """
        self.pre_backward(closure_loss)  # a subclass may override this and `post_backward`
        loss = self._required_run.micro_batches.backward(closure_loss, optimizer, args, kwargs)
        self.post_backward(loss)
        return loss

    # --- One optimizer step -------------------------------------------------------------------------------------------

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        """Run the window's last micro-batch (``closure``), let hooks see the final gradients, clip, step.

        A collective. Raises RuntimeError if the gradients of ``optimizer`` are not final, or if it calls ``closure``
        again where that is a part of the window.
        """
        run = self._required_run
        run_closure = partial(run.run_closure, closure, optimizer, itertools.count())
        try:
            output = super().optimizer_step(optimizer, run_closure, model, **kwargs)
        except BaseException:
            run.steps.whole.abandon()  # user code may go on, with shards
            raise
        if optimizer in run.windows.since_step:
            run.windows.stepped(optimizer)  # a gradient scaler has skipped the step
        return output

    def _reach_resumable_point(self) -> None:
        """Note that a run may resume from here, where all batches so far are in the weights; stop if all ranks do."""
        if self._resume is not None:
            self._resume.stepped()
        if self._stops:
            lightning_internals.tell_sigterm(self._module.trainer)

    def _stop_before_validation(self) -> None:
        """Stop, if all ranks do: Lightning would stop inside the validation, which a resumed run would then repeat."""
        trainer = self._module.trainer
        if trainer.received_sigterm and self._resume is not None:
            trainer.training = True  # Lightning saves, and leaves, as after a training step
            self._resume.has_stopped_before_validation = True
            raise lightning_internals.SIGTERMException

    def clip_gradients(
        self,
        optimizer: Optimizer | LightningOptimizer,
        clip_val: float,
        algorithm: Literal["norm", "value"] = "norm",
    ) -> Tensor:
        """Clip the gradients of ``optimizer``, in manual optimization before its step. A collective.

        Args:
            optimizer: One of ``self.optimizers()``.
            clip_val: Largest global norm, or largest absolute value of an element.
            algorithm: ``"norm"`` or ``"value"``.

        Returns:
            [] the global 2-norm before clipping.

        Raises:
            ValueError: If ``clip_val`` is not positive or ``algorithm`` is neither.
            RuntimeError: If an accumulation window of ``optimizer`` is still open.
        """
        return self._required_run.steps.clip(optimizer, clip_val, algorithm)

    @override
    def on_train_end(self) -> None:
        run = self._required_run
        run.engine.release()
        if self._supervisor.watch is not None:
            # A rank that stops alone would communicate with others' steps.
            self._supervisor.watch.await_end_of_training(validates=False)
        run.compare_ranks()
        run.check_replicas()
        run.synchronize_buffers()

    # --- Beside training ----------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self) -> None:
        self._take_module_back()
        if self._module.trainer.state.fn == TrainerFn.VALIDATING:
            self._expect_barriers("run-stage")
        elif self._supervisor.watch is not None:
            # A rank that stops alone, or whose epoch has ended early, would communicate with others' steps.
            self._supervisor.watch.await_end_of_training(validates=True)
        self._required_run.start_validation()

    @override
    def on_test_start(self) -> None:
        self._expect_barriers("run-stage")

    @override
    def on_predict_start(self) -> None:
        self.on_test_start()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._required_run.evaluation_step(
            super().validation_step, self._begin_evaluation, *args, **kwargs
        )

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._required_run.evaluation_step(super().test_step, self._begin_evaluation, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._required_run.evaluation_step(
            super().predict_step, self._begin_evaluation, *args, **kwargs
        )

    @override
    def on_validation_end(self) -> None:
        self.barrier("the end of an evaluation")
        self._required_run.compare_ranks()

    @override
    def on_test_end(self) -> None:
        self.on_validation_end()

    @override
    def on_predict_end(self) -> None:
        self.on_validation_end()

    def _begin_evaluation(self) -> bool:
        """Begin a step of evaluation, and return whether all ranks stop after it: within a fit they do not."""
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            if self._supervisor.watch is not None:
                self._supervisor.watch.made_progress = True
            return False
        stops = self._begin_step(None)
        if stops:
            lightning_internals.tell_sigterm(self._module.trainer)
        return stops

    def evaluated(self, batch: Any, output: Any, step: str) -> Tensor:
        """[2] sum of losses and its denominator, of a batch and what ``step`` returned for it; for ``EvaluationLoss``.

        Counted like training batches. Nothing is communicated. Raises ValueError without a loss or a count.
        """
        return self._required_run.evaluated(batch, output, step)

    @override
    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduce a value over the ranks that hold different tokens (or ``group``): one all-reduce, out of place.

        The mean of integers is exact. Non-tensors are returned unchanged. Of a ``DTensor``, the full one is
        reduced. After a failure for which the other ranks do not come, the value is returned unchanged.
        A mean within ``training_step`` leaves out ranks with a padding batch, unless all have one.
        """
        if not isinstance(tensor, Tensor) or self._mesh is None or self._supervisor.is_alone:
            return tensor
        collectives.gathers.check()
        tensor = collectives.full(tensor)
        inputs = None if self._run is None else self._run.inputs
        if inputs is not None and group is None:  # a group of the user's may lack some ranks
            inputs.note_reduction()
        group = group or self._mesh.group
        num_averaged = None
        if inputs is not None and collectives.is_mean(reduce_op):
            # With padding batches alone their mean is taken, by which a loss without weight may be divided.
            num_averaged = inputs.num_with_data(group) or group.size()
            if inputs.is_filler and num_averaged < group.size():
                tensor = torch.zeros_like(tensor)
        return collectives.reduce_tensor(tensor, group, reduce_op, self.root_device, num_averaged)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, decide so. After a failure for which they do not come, this rank's decision.

        ``ModelCheckpoint(save_on_exception=True)`` asks, and would wait for ranks in other collectives.
        """
        if self._supervisor.is_alone:
            return decision
        # Lightning's own compares a sum over ranks that hold different tokens with the size of the world.
        operation = "min" if all else "max"
        return bool(self.reduce(torch.tensor(int(decision)), dist.group.WORLD, operation))

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack a tensor of one shape from every rank. A collective over the group.

        Over all ranks, it raises on each if shapes differ (in training steps at the last batch of an
        epoch, which may be shorter on some), and in an evaluation step if a rank has no data left. In a
        training step it raises if a rank of the group has a padding batch.
        """
        if self._run is not None:
            self._run.inputs.check_gathering(tensor, group)
        if sync_grads or not dist.is_initialized():
            return super().all_gather(tensor, group, sync_grads)
        # Lightning's own calls a function that torch 2.13 has deprecated, with a warning on each rank.
        tensor = tensor.detach().contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor, group)
        return torch.stack(gathered)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        collectives.gathers.check()
        return collectives.broadcast_object(obj, src)

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._saver.model_state(self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        is_together = not self._supervisor.has_failed
        return self._saver.optimizer_state(self._named(optimizer), is_together)

    def _named(self, optimizer: Optimizer) -> NamedOptimizer:
        optimizer = unwrap(optimizer)
        owned = {} if self._run is None else self._run.steps.whole.of(optimizer)
        return NamedOptimizer(self._module, optimizer, owned)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint, which appears in one step or not at all. Every rank must call it, together.

        Raises:
            CheckpointError: On every rank, if saving failed on any; older checkpoints are unchanged.
            RuntimeError: After the strategy's ``timeout``, if not every rank saves; it names the missing
                ranks. In a process that is none of the ranks.
        """
        module = self._module
        if self.world_size > 1 and not dist.is_initialized():
            self._saver.refuse(
                filepath,
                "this process is no rank, since it has launched them, or left their process group. Save in hooks of"
                " callbacks or the module; the ranks have called on_exception themselves",
            )
            return
        is_together = self._meet_to_save()
        ranks = None
        if is_together and dist.is_initialized():
            ranks = collectives.host_group(self._options.parsed_timeout)
        # What the checkpoint holds besides what Lightning has put into it.
        resume = self._resume or self._ended_fit
        if "optimizer_states" in checkpoint and resume is not None:
            resume.add_to(checkpoint, self._joined_mesh.sizes_by_name(), ranks)
        if not is_together:
            self._saver.save_alone(checkpoint, filepath)
            return
        state = module.trainer.state
        goes_on = state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        self._saver.save(checkpoint, module, filepath, storage_options, goes_on, ranks)

    def _meet_to_save(self) -> bool:
        """Whether all ranks save together; False if others have left after a failure. A collective.

        RankFailedError after the strategy's timeout, if not every rank saves.
        """
        if self._supervisor.is_alone:
            return False
        collectives.gathers.check()
        timeout = self._options.parsed_timeout
        # All ranks come to the save before the job is requeued, but may not to another one at a stop.
        if self._supervisor.has_failed and not self._requeues:
            timeout = min(timeout, _TIME_TO_MEET_AFTER_A_STOP)
        # Without this barrier, collectives of saving could pair with others of ranks that do not save.
        collectives.named_barrier("save_checkpoint", timeout)
        return True

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Check a checkpoint of any form, and read all but the shards. Every rank must call it, together.

        Raises ``CheckpointError`` on every rank, if any cannot read it.
        """
        self._required_run.engine.release()
        if weights_only is None:
            weights_only = self._supervisor.weights_only
        self._loader = CheckpointLoader()
        checkpoint = self._loader.open(checkpoint_path, weights_only, self.checkpoint_io)
        state = checkpoint.pop(CHECKPOINT_KEY, None)
        if self._resume is not None:
            self._advice.about_late_loading(self._module)
            self._resume.load(state, checkpoint, self._joined_mesh.sizes_by_name())
        self._loader.watch_loops()
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        optimizers = None
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            optimizers = [self._named(optimizer) for optimizer in self.optimizers]
        edited = cast(dict[str, Any], checkpoint)
        self._loader.fill_model(edited, self._module, optimizers, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._loader.fill_optimizers(cast(dict[str, Any], checkpoint))

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """True: shards must exist, and values are loaded in the dtype that the model trains in."""
        return True

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint. If a save in flight replaces it, it is removed once that save is on disk."""
        self._saver.remove(filepath)

    # --- Leaving ------------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        checks.explain(exception, self._module)
        # The others know of a failure, so that none of them comes to the block's end.
        with suppress(RankFailedError):
            self._setup_block.close()
        if self._requeues and isinstance(exception, lightning_internals.SIGTERMException):
            lightning_internals.save_and_requeue(self._module.trainer)
        if self._run is not None:
            with self._supervisor.tearing_down():
                self._run.interrupt()

    @property
    def _requeues(self) -> bool:
        """Whether all ranks stop to save, and to requeue the job."""
        watch = self._supervisor.watch
        return watch is not None and watch.stop.requeues

    @override
    def teardown(self) -> None:
        try:
            self._loader.discard()
            self._loader = CheckpointLoader()
            self._saver.close(was_interrupted=self._supervisor.has_failed)
        finally:
            try:
                with self._supervisor.tearing_down():
                    self._teardown_training()
            finally:
                self._supervisor.close()

    def _teardown_training(self) -> None:
        trainer = self._trainer
        self._trainer = None
        had_run = self._run is not None
        try:
            self._close_run()
        finally:
            self.model = self.lightning_module
            if trainer is not None and had_run and self.world_size > 1:
                lightning_internals.keep_signal_handlers(trainer)
            self._patches.restore()
        if had_run and not self._options.is_sharded:
            if self._layer_sync is not None and self.model is not None:
                self._layer_sync.revert(self.model)
            super().teardown()
            return
        # Unlike the base class, leave the model where it is: on the host, shards would not fit their mesh.
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            if part is not None:
                part.teardown()

    def _close_run(self) -> None:
        try:
            if self._run is not None:
                self._run.close()
        finally:
            resume = self._resume
            self._resume = None
            if resume is not None:
                self._ended_fit = resume
                resume.close()

    # --- Explaining ---------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What was decided and why: mesh, units, divisors, modes, dtypes, memory. Before set-up, only the options."""
        if self._run is None:
            described = {}
        else:
            described = self._run.describe()
        return {"options": dict(vars(self._options)), **described}
