"""What a layout needs of each rank: memory, collectives and seconds of an optimizer step."""

from collections import Counter
from dataclasses import dataclass

from lightning_automodel.distributed.mesh import resolve_sizes
from lightning_automodel.options import StrategyOptions
from lightning_automodel.plan.recording import MicroBatch, Parameter


@dataclass(frozen=True)
class Assumptions:
    """What is assumed of the machines. Bandwidths are bytes a second, of one rank and in one direction."""

    memory: float  # bytes of a device that tensors may take
    flops: float  # floating-point operations a second that matrix products reach, in half precision
    flops_32: float  # the same in float32
    memory_bandwidth: float  # of the device's memory
    node_bandwidth: float  # between ranks of a node
    network_bandwidth: float  # between nodes
    host_bandwidth: float  # between a device and the host, for cpu_offload
    latency: float  # seconds of a collective beside its bytes
    overlap: float  # part of the computation beside which gathers and reductions run
    is_host: bool  # whether ranks compute on the CPU: gloo copies what it sends, optimizers step by parameter


DEVICES = {
    "h100": Assumptions(72e9, 450e12, 220e12, 2.7e12, 350e9, 45e9, 40e9, 3e-5, 0.8, False),
    "a100": Assumptions(72e9, 160e12, 80e12, 1.6e12, 230e9, 22e9, 20e9, 3e-5, 0.8, False),
    "cpu": Assumptions(8e9, 3e10, 3e10, 5e9, 1e9, 1e8, 5e9, 1e-3, 0.8, True),
}


class Plan:
    """One layout of one model: ``micro`` is what a micro-batch does, ``accumulate`` how many a rank has in a step.

    ``defer_fsdp_grad_sync="auto"`` is taken for True, and ``reshard_during_accumulation="auto"`` too.

    Attributes:
        memory: Bytes by what they hold, where most is held; ``high_water`` is their sum.
        state: Bytes of parameters, gradients and optimizer state, also on the host.
        sent: How many collectives of (group, kind, bytes) a step has, bytes being the larger of those given and got.
        groups: Ranks of each group, and how many of them are on one node.
        seconds: Of an optimizer step.
    """

    def __init__(
        self,
        micro: MicroBatch,
        options: StrategyOptions,
        world_size: int,
        accumulate: int,
        assumed: Assumptions,
        ranks_per_node: int,
    ) -> None:
        self.micro, self.options, self.accumulate, self.assumed = micro, options, accumulate, assumed
        self.nodes = -(-world_size // ranks_per_node)
        tensor, context = options.tensor_parallel_size, options.context_parallel_size
        data = options.data_parallel, options.data_parallel_size, options.data_parallel_replicate_size
        self.sizes = resolve_sizes(*data, tensor, world_size, self.nodes, context)
        self._shards, self._is_sharded = self.sizes.shard * context, options.data_parallel == "fsdp2"
        self._frees = bool(options.reshard_during_accumulation)
        # On one rank the strategy has nothing to defer.
        self._defers = options.defer_fsdp_grad_sync in (True, "auto") and self.sizes.divisor > 1
        # Ranks of each group, and how far apart they are: tensor peers are neighbours, then context peers, then shards.
        ranks = {
            "tensor": (tensor, 1),
            "context": (context, tensor),
            "shard": (self._shards, tensor),
            "replicate": (self.sizes.replicate, tensor * self._shards),
            "tokens": (self.sizes.divisor, tensor),
        }
        self.groups = {name: (n, max(1, min(n, ranks_per_node // apart))) for name, (n, apart) in ranks.items()}
        self._parameters = [p if self._is_sharded else p._replace(unit=None) for p in micro.parameters]
        self.high_water, self.memory = 0, Counter[str]()
        self._add_up()
        self._follow()
        self.sent = self._count()
        self.seconds = self._time()

    def _add_up(self) -> None:
        """Of each unit: parameters as gathered, and gradients as accumulated, as reduced and on this rank."""
        self._held = Counter[str]()
        sizes = (Counter[int | None]() for _ in range(4))
        self._unsharded, self._accumulated, self._reduced, self._own = sizes
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
        if self.options.cpu_offload and not self.assumed.is_host:
            self._held, self._own = Counter(), Counter()

    def __str__(self) -> str:
        sizes, options = self.sizes, self.options
        text = f"{options.data_parallel} {sizes.replicate} x {sizes.shard} TP {sizes.tensor} CP {sizes.context}"
        text += " kept" * (not self._frees)
        text += " undeferred" * (options.defer_fsdp_grad_sync in (False, "all_reduce"))
        return text + " recomputed" * bool(options.activation_checkpointing) + " offloaded" * options.cpu_offload

    def _follow(self) -> None:
        """Follow an optimizer step; of its micro-batches, the third and later ones are like the second."""
        root, rounds = self.micro.num_units, min(self.accumulate, 2)
        buckets = Counter[int | None]({None: 0 if self._is_sharded else self._own[None]})  # DDP's
        self._gathered, self._gradients = set[int](), self._own + buckets  # gradients of the step before
        for number in range(rounds):
            is_first, is_last = number == 0, number == rounds - 1
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
                    self._gradients = buckets.copy()
                elif kind == "gradient":
                    p = self._parameters[index]
                    # FSDP2 adds to a gradient of another dtype once it has all of a unit.
                    casts, is_reduced = p.computed != p.reduced, p.unit is not None and not self._defers
                    is_new = is_first or is_reduced or (self._is_sharded and casts)
                    self._gradients[p.unit] += p.numel * p.computed * is_new
                    if p.unit is not None:
                        self._gather(p.unit, p.unit - bool(missing[p.unit - 1]))
                        missing[p.unit] -= 1
                        if not missing[p.unit]:
                            self._reduce(p.unit, is_last)
            for unit in sorted(+missing):
                self._reduce(unit, is_last)
        self._gathered.clear()
        self._see("optimizer", 0 if self.assumed.is_host else self._held["parameters"])

    def _gather(self, unit: int, following: int) -> None:
        """Gather a unit, and start with the one that follows; for a while the all-gather holds it once more."""
        new = {unit, following} - self._gathered
        self._gathered |= new
        self._see("gathered", max((self._unsharded[each] for each in new), default=0))

    def _reduce(self, unit: int, is_last: bool) -> None:
        """End a unit's backward."""
        if self._frees:
            self._gathered.discard(unit)
        reduces = is_last or not self._defers
        if reduces:
            self._see("gradients", self._reduced[unit] * (1 + self.assumed.is_host))
        self._gradients[unit] = self._own[unit] if reduces else self._accumulated[unit]

    def _see(self, name: str, extra: int) -> None:
        """Note what is held now, with ``extra`` bytes for a while, if it is the most."""
        held = self._held.copy()
        held["gradients"] = self._gradients.total()
        held["gathered"] = sum(self._unsharded[unit] for unit in self._gathered)
        held[name] += extra
        if held.total() > self.high_water:
            self.high_water, self.memory = held.total(), held

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
        ready = [self._parameters[index] for kind, index, _, _ in self.micro.events if kind == "gradient"]
        for size in [sum((p.numel + 1) * p.stored for p in whole)] if self._is_sharded else _ddp_buckets(ready):
            sent["tokens", "all_reduce", size] += 1
        sent["tokens", "broadcast", self.micro.buffers[self._is_sharded]] += 1
        # Of a window its count, loss and number of micro-batches, the order of its units as two numbers, and which
        # sharded parameters were used.
        sent["tokens", "all_reduce", 8 * (5 + sum(p.is_trained for p in self._parameters) - len(whole))] += 1
        return Counter({key: number for key, number in sent.items() if key[2] and self.groups[key[0]][0] > 1})

    def bytes_by_link(self) -> tuple[int, int]:
        """Of an optimizer step: those of groups within a node, and those of groups that span nodes."""
        spans = {group: ranks > neighbours for group, (ranks, neighbours) in self.groups.items()}
        sizes = [(spans[group], size * number) for (group, _, size), number in self.sent.items()]
        return sum(size for far, size in sizes if not far), sum(size for far, size in sizes if far)

    def _time(self) -> dict[str, float]:
        assumed, micro = self.assumed, self.micro
        speed = assumed.flops if min(p.computed for p in micro.parameters) == 2 else assumed.flops_32
        works = [(max(flops / speed, size / assumed.memory_bandwidth), n) for (flops, size), n in micro.work.items()]
        compute = sum(seconds * number for seconds, number in works)
        waits = beside = 0.0
        for (group, kind, size), number in self.sent.items():
            # As rings that share a node's links. An all-reduce passes everything twice, as gloo's reduce-scatter does.
            ranks, neighbours = self.groups[group]
            passes = size * (2 if kind == "all_reduce" or (assumed.is_host and kind == "reduce_scatter") else 1)
            within = passes * (1 - 1 / neighbours) / assumed.node_bandwidth
            between = passes * (1 - neighbours / ranks) / (assumed.network_bandwidth * neighbours)
            seconds = number * (max(within, between) + assumed.latency)
            # Peers wait for each other within a layer; what goes over data-parallel ranks runs beside the computation.
            if group in ("tensor", "context"):
                waits += seconds
            else:
                beside += seconds
        # On a host FSDP2 waits for each collective. DDP reduces beside the last backward.
        overlap = 0.0 if assumed.is_host and self._is_sharded else assumed.overlap
        communicates_each = self._is_sharded and (self._frees or not self._defers)
        hidden = min(beside, overlap * compute * (self.accumulate if communicates_each else 1))
        link = assumed.host_bandwidth if self.options.cpu_offload else assumed.memory_bandwidth
        found = {"compute": compute * self.accumulate, "optimizer": 2 * self.state / link}
        found["communicate"] = waits + beside
        return {**found, "hidden": hidden, "step": sum(found.values()) - hidden}


def _ddp_buckets(ready: list[Parameter]) -> list[int]:
    """Bytes of DDP's buckets, the first of 1 MiB, then 25: it fills them as gradients come."""
    buckets = [0]
    for parameter in ready:
        if buckets[-1] >= (1 << 20 if len(buckets) == 1 else 25 << 20):
            buckets.append(0)
        buckets[-1] += parameter.numel * parameter.stored
    return buckets
