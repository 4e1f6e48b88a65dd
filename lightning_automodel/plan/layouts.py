"""What a layout needs of each rank: memory, collectives and seconds of an optimizer step."""

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

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
    "cpu": Assumptions(8e9, 3e10, 3e10, 5e9, 1e9, 1e8, 5e9, 1e-3, 0.0, True),
}


@dataclass(frozen=True)
class Layout:
    """Options of the strategy by their names there."""

    data_parallel: str
    data_parallel_size: int
    data_parallel_replicate_size: int = 1
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    activation_checkpointing: bool = False
    reshard_during_accumulation: bool | str = "auto"
    cpu_offload: bool = False

    @property
    def shards(self) -> int:
        """Ranks that one copy of the parameters is sharded over."""
        copies = self.data_parallel_replicate_size
        return self.data_parallel_size // copies * self.context_parallel_size if self.data_parallel == "fsdp2" else 1

    def options(self) -> dict[str, Any]:
        """Keywords of ``AutomodelStrategy``."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        size, copies = self.data_parallel_size, self.data_parallel_replicate_size
        text = f"HSDP {copies} x {size // copies}" if copies > 1 else f"{self.data_parallel.upper()} {size}"
        if self.data_parallel == "fsdp2":
            text += " freed" if self.reshard_during_accumulation else " kept"
        sizes = {"TP": self.tensor_parallel_size, "CP": self.context_parallel_size}
        text += "".join(f" {name} {size}" for name, size in sizes.items() if size > 1)
        return text + " recomputed" * self.activation_checkpointing + " offloaded" * self.cpu_offload


class Plan:
    """One layout of one model: ``micro`` is what a micro-batch does, ``accumulate`` how many a rank has in a step.

    ``memory`` has bytes by what they hold, where most is held. Of an optimizer step, ``seconds``, and ``sent``: how many
    collectives of (group, kind, bytes) a rank has; of the bytes that it gives and those that it gets, the larger.
    """

    def __init__(
        self, micro: MicroBatch, layout: Layout, accumulate: int, assumed: Assumptions, local_ranks: int
    ) -> None:
        self.micro, self.layout, self.accumulate = micro, layout, accumulate
        self.assumed, self.local_ranks = assumed, local_ranks
        self._is_sharded, shards = layout.data_parallel == "fsdp2", layout.shards
        self._parameters = [p if self._is_sharded else p._replace(unit=None) for p in micro.parameters]
        self._whole = [p for p in self._parameters if p.is_trained and p.unit is None]
        # By unit: parameters as gathered, and gradients as accumulated, as reduced and on this rank.
        sizes = (Counter[int | None]() for _ in range(4))
        self._unsharded, self._accumulated, self._reduced, self._own = sizes
        self._held = Counter[str]()
        for p in self._parameters:
            numel = p.numel if p.unit is None else p.shard(shards)
            self._held["parameters"] += numel * p.stored
            self._unsharded[p.unit] += numel * shards * p.computed
            if p.is_trained:
                self._held["optimizer"] += int(numel * micro.state)
                self._accumulated[p.unit] += p.numel * p.reduced
                self._reduced[p.unit] += numel * shards * p.reduced
                self._own[p.unit] += numel * p.stored
        self._state = sum(self._held.values()) + sum(self._own.values())
        if layout.cpu_offload:
            self._held.clear()
            self._own.clear()
        self.memory: dict[str, int] = {}
        self._follow()
        self.sent = self._count()
        self.seconds = self._time()

    # --- Memory -------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Follow an optimizer step; of its micro-batches, the third and later ones are like the second."""
        root, rounds = self.micro.num_units, min(self.accumulate, 2)
        buckets = Counter({None: 0 if self._is_sharded else self._own[None]})
        self._gathered, self._gradients = set[int](), self._own + buckets  # gradients of the step before
        for number in range(rounds):
            is_first, is_last = number == 0, number == rounds - 1
            missing = Counter(p.unit for p in self._parameters if p.is_trained and p.unit is not None)
            missing[root] += 1
            self._held["activations"] = 0
            for event in self.micro.events:
                self._see("activations", event.peak)
                self._held["activations"] += event.net
                if event.kind == "gather":
                    self._gather(event.index, (event.index + 1) % (root + 1))
                elif event.kind == "free":
                    self._free(event.index)
                elif event.kind == "loss" and is_first:
                    self._gradients = buckets.copy()
                elif event.kind == "gradient":
                    p = self._parameters[event.index]
                    if p.unit is None:
                        self._gradients[None] += p.numel * p.stored * is_first
                    else:
                        self._gather(p.unit, p.unit - bool(missing[p.unit - 1]))
                        # FSDP2 adds to a gradient of another dtype once it has all of a unit.
                        self._gradients[p.unit] += p.numel * p.computed * (is_first or p.computed != p.reduced)
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

    def _free(self, unit: int) -> None:
        if self.layout.reshard_during_accumulation:
            self._gathered.discard(unit)

    def _reduce(self, unit: int, is_last: bool) -> None:
        """End a unit's backward."""
        self._free(unit)
        if is_last:
            self._see("gradients", self._reduced[unit] * (1 + self.assumed.is_host))
        self._gradients[unit] = self._own[unit] if is_last else self._accumulated[unit]

    def _see(self, name: str, extra: int) -> None:
        """Note what is held now, with ``extra`` bytes for a while, if it is the most."""
        held = Counter(self._held, gradients=sum(self._gradients.values()))
        held["gathered"] = sum(self._unsharded[unit] for unit in self._gathered)
        held[name] += extra
        if sum(held.values()) > sum(self.memory.values()):
            self.memory = dict(held)

    # --- Communication and time ---------------------------------------------------------------------------------------

    def _count(self) -> Counter[tuple[str, str, int]]:
        sent = Counter({key: number * self.accumulate for key, number in self.micro.messages.items()})
        for unit in range(self.micro.num_units + 1):
            again = self.accumulate * (1 if unit == self.micro.num_units else 2)
            sent["shard", "all_gather", self._unsharded[unit]] += (
                again if self.layout.reshard_during_accumulation else 1
            )
            sent["shard", "reduce_scatter", self._reduced[unit]] += 1
            sent["replicate", "all_reduce", self._reduced[unit] // self.layout.shards] += 1
        ready = [self._parameters[event.index] for event in self.micro.events if event.kind == "gradient"]
        flagged = sum((p.numel + 1) * p.stored for p in self._whole)
        for size in [flagged] if self._is_sharded else _ddp_buckets(ready):
            sent["tokens", "all_reduce", size] += 1
        sent["tokens", "broadcast", self.micro.buffers[self._is_sharded]] += 1
        # Of a window its count, loss and number of micro-batches, and which sharded parameters were used.
        tracked = sum(p.is_trained for p in self._parameters) - len(self._whole)
        sent["tokens", "all_reduce", 8 * (3 + tracked)] += 1
        return Counter({key: number for key, number in sent.items() if key[2] and self.ranks(key[0])[0] > 1})

    def ranks(self, group: str) -> tuple[int, int]:
        """Ranks of a group, and how many are on one node: tensor peers come first, then context peers, then shards."""
        layout = self.layout
        tensor, context = layout.tensor_parallel_size, layout.context_parallel_size
        ranks, apart = {
            "tensor": (tensor, 1),
            "context": (context, tensor),
            "shard": (layout.shards, tensor),
            "replicate": (layout.data_parallel_replicate_size, tensor * layout.shards),
            "tokens": (layout.data_parallel_size * context, tensor),
        }[group]
        return ranks, max(1, min(ranks, self.local_ranks // apart))

    def bytes_between_nodes(self) -> int:
        """Of groups that span nodes, in one optimizer step."""
        spanning = {group for group, _, _ in self.sent if self.ranks(group)[0] > self.ranks(group)[1]}
        return sum(size * number for (group, _, size), number in self.sent.items() if group in spanning)

    def _time(self) -> dict[str, float]:
        assumed, micro = self.assumed, self.micro
        is_half = min(p.computed for p in micro.parameters) < 4
        one = (
            micro.flops / (assumed.flops if is_half else assumed.flops_32) + micro.num_bytes / assumed.memory_bandwidth
        )
        spent = Counter[bool]()
        for (group, kind, size), number in self.sent.items():
            # As rings that share the links of a node; an all-reduce is a reduce-scatter and an all-gather.
            ranks, neighbours = self.ranks(group)
            passes = size * (2 if kind == "all_reduce" else 1)
            within = passes * (1 - 1 / neighbours) / assumed.node_bandwidth
            between = passes * (1 - neighbours / ranks) / (assumed.network_bandwidth * neighbours)
            # Peers wait for each other within a layer; what goes over data-parallel ranks runs beside the computation.
            spent[group in ("tensor", "context")] += number * (max(within, between) + assumed.latency)
        beside = self.accumulate if self.layout.reshard_during_accumulation else 1
        hidden = min(spent[False], assumed.overlap * one * beside)
        link = assumed.host_bandwidth if self.layout.cpu_offload else assumed.memory_bandwidth
        found = {"compute": one * self.accumulate, "optimizer": 2 * self._state / link, "communicate": spent.total()}
        return {**found, "hidden": hidden, "step": sum(found.values()) - hidden}


def _ddp_buckets(ready: list[Parameter]) -> list[int]:
    """Bytes of DDP's buckets, the first of 1 MiB, then 25: it fills them as gradients come."""
    buckets = [0]
    for parameter in ready:
        if buckets[-1] >= (1 << 20 if len(buckets) == 1 else 25 << 20):
            buckets.append(0)
        buckets[-1] += parameter.numel * parameter.stored
    return buckets
