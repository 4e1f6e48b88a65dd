"""What a layout costs each rank: memory, and the collectives of an optimizer step."""

from collections import Counter

from lightning_automodel.distributed.mesh import resolve_sizes
from lightning_automodel.options import StrategyOptions
from lightning_automodel.plan.recording import PlannedBatch

_BytesByUnit = Counter[int | None]


class Plan:
    """One sharded layout of one model. ``micro`` records a micro-batch; a rank has ``accumulate`` of them in a step.

    ``defer_fsdp_grad_sync="auto"`` and ``reshard_during_accumulation="auto"`` are taken for True. With
    ``is_host`` ranks compute on the CPU, where gloo copies its messages and optimizers step by parameter.

    Attributes:
        memory: Bytes by their content when memory is fullest; ``high_water`` is their sum.
        state: Bytes of parameters, gradients and optimizer state, on the device or the host.
        sent: Number of collectives in a step by (group, kind, bytes), which are those of the larger side.
        groups: Ranks of each group, and how many of them are on one node.
    """

    def __init__(
        self,
        micro: PlannedBatch,
        options: StrategyOptions,
        world_size: int,
        accumulate: int,
        ranks_per_node: int,
        is_host: bool = False,
    ) -> None:
        self.micro = micro
        self.options = options
        self.accumulate = accumulate
        self.is_host = is_host
        self.sizes = resolve_sizes(
            data_parallel="fsdp2",
            world_size=world_size,
            num_nodes=-(-world_size // ranks_per_node),
            **options.sizes(),
        )
        self._shards = self.sizes.shard * self.sizes.context
        self._frees = bool(options.reshard_during_accumulation)
        # On one rank the strategy has nothing to defer.
        self._defers = options.defer_fsdp_grad_sync in (True, "auto") and self.sizes.divisor > 1
        self.groups = self._groups(ranks_per_node)
        self._parameters = micro.parameters
        self.high_water = 0
        self.memory = Counter[str]()
        self._add_up()
        self._follow()
        self.sent = self._count()

    def _groups(self, ranks_per_node: int) -> dict[str, tuple[int, int]]:
        tensor = self.sizes.tensor
        # Ranks of each group, and their distance: tensor peers are closest, then context peers, then shards.
        ranks = {
            "tensor": (tensor, 1),
            "context": (self.sizes.context, tensor),
            "shard": (self._shards, tensor),
            "replicate": (self.sizes.replicate, tensor * self._shards),
            "tokens": (self.sizes.divisor, tensor),
        }
        return {name: (n, max(1, min(n, ranks_per_node // apart))) for name, (n, apart) in ranks.items()}

    def _add_up(self) -> None:
        """Add up the bytes of each unit: gathered parameters; accumulated, reduced and sharded gradients."""
        self._held = Counter[str]()
        self._unsharded = _BytesByUnit()
        self._accumulated = _BytesByUnit()
        self._reduced = _BytesByUnit()
        self._own = _BytesByUnit()
        for p in self._parameters:
            numel = p.numel if p.unit is None else p.shard(self._shards)
            self._held["parameters"] += numel * p.stored
            self._unsharded[p.unit] += numel * self._shards * p.computed
            if p.is_trained:
                self._held["optimizer"] += int(numel * self.micro.state)
                self._accumulated[p.unit] += p.numel * p.reduced
                self._reduced[p.unit] += numel * self._shards * p.reduced
                self._own[p.unit] += numel * p.stored
        self.state = self._held.total() + self._own.total()
        if self.options.cpu_offload and not self.is_host:
            self._held.clear()
            self._own.clear()

    def __str__(self) -> str:
        sizes = self.sizes
        options = self.options
        text = f"{sizes.replicate} x {sizes.shard} TP {sizes.tensor} CP {sizes.context}"
        text += " kept" * (not self._frees)
        text += " undeferred" * (options.defer_fsdp_grad_sync in (False, "all_reduce"))
        text += " recomputed" * bool(options.activation_checkpointing)
        return text + " offloaded" * options.cpu_offload

    def _follow(self) -> None:
        """Follow the memory of an optimizer step. Its micro-batches after the second are like the second."""
        rounds = min(self.accumulate, 2)
        self._gathered = set[int]()
        self._gradients = self._own.copy()  # of the step before
        for number in range(rounds):
            self._follow_micro_batch(is_first=number == 0, is_last=number == rounds - 1)
        self._gathered.clear()
        self._see("optimizer", 0 if self.is_host else self._held["parameters"])

    def _follow_micro_batch(self, is_first: bool, is_last: bool) -> None:
        root = self.micro.num_units
        missing = Counter(p.unit for p in self._parameters if p.is_trained and p.unit is not None)
        missing[root] += 1
        self._held["activations"] = 0
        for kind, index, peak, net in self.micro.events:
            self._see("activations", peak)
            self._held["activations"] += net
            if kind == "gather":
                self._gather(index, (index + 1) % (root + 1))
            elif kind == "free" and self._frees:
                self._gathered.discard(index)
            elif kind == "loss" and is_first:
                self._gradients = _BytesByUnit()
            elif kind == "gradient":
                p = self._parameters[index]
                is_reduced = p.unit is not None and not self._defers
                # FSDP2 adds to a gradient of another dtype only once it has all gradients of a unit.
                is_cast = p.computed != p.reduced
                self._gradients[p.unit] += p.numel * p.computed * (is_first or is_reduced or is_cast)
                if p.unit is not None:
                    self._gather(p.unit, p.unit - bool(missing[p.unit - 1]))
                    missing[p.unit] -= 1
                    if not missing[p.unit]:
                        self._reduce(p.unit, is_last)
        for unit in sorted(+missing):
            self._reduce(unit, is_last)

    def _gather(self, unit: int, following: int) -> None:
        """Gather a unit and the one that follows it; during the all-gather, the larger one is held twice."""
        new = {unit, following} - self._gathered
        self._gathered |= new
        self._see("gathered", max((self._unsharded[index] for index in new), default=0))

    def _reduce(self, unit: int, is_last: bool) -> None:
        """End a unit's backward."""
        if self._frees:
            self._gathered.discard(unit)
        if is_last or not self._defers:
            self._see("gradients", self._reduced[unit] * (1 + self.is_host))
            self._gradients[unit] = self._own[unit]
        else:
            self._gradients[unit] = self._accumulated[unit]

    def _see(self, name: str, extra: int) -> None:
        """Update the high water with the memory that is held now and ``extra`` temporary bytes."""
        held = self._held.copy()
        held["gradients"] = self._gradients.total()
        held["gathered"] = sum(self._unsharded[unit] for unit in self._gathered)
        held[name] += extra
        if held.total() > self.high_water:
            self.high_water = held.total()
            self.memory = held

    def _count(self) -> Counter[tuple[str, str, int]]:
        sent = Counter({key: number * self.accumulate for key, number in self.micro.messages.items()})
        scatters = 1 if self._defers else self.accumulate
        all_reduces = self.accumulate if self.options.defer_fsdp_grad_sync is False else 1
        for unit in range(self.micro.num_units + 1):
            again = self.accumulate * (1 if unit == self.micro.num_units else 2)
            sent["shard", "all_gather", self._unsharded[unit]] += again if self._frees else 1
            sent["shard", "reduce_scatter", self._reduced[unit]] += scatters
            sent["replicate", "all_reduce", self._reduced[unit] // self._shards] += all_reduces
        whole = [p for p in self._parameters if p.is_trained and p.unit is None]
        sent["tokens", "all_reduce", sum((p.numel + 1) * p.stored for p in whole)] += 1
        sent["tokens", "broadcast", self.micro.buffers] += 1
        # For a window: its count, loss and number of micro-batches, two numbers of what steps have written, six of
        # its position, and for each sharded parameter whether it was used.
        sent[
            "tokens", "all_reduce", 8 * (11 + sum(p.is_trained for p in self._parameters) - len(whole))
        ] += 1
        return Counter(
            {key: number for key, number in sent.items() if key[2] and self.groups[key[0]][0] > 1}
        )

    def bytes_by_link(self) -> tuple[int, int]:
        """Bytes that an optimizer step sends in groups within a node, and in groups that span nodes."""
        spans = {group: ranks > neighbours for group, (ranks, neighbours) in self.groups.items()}
        sizes = [(spans[group], size * number) for (group, _, size), number in self.sent.items()]
        return sum(size for far, size in sizes if not far), sum(size for far, size in sizes if far)
