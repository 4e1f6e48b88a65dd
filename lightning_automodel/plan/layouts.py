"""What a layout needs of each rank: memory, collectives and seconds of an optimizer step."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from lightning_automodel.plan.recording import MicroBatch, Parameter

_DDP_BUCKETS = (1 << 20, 25 << 20)  # bytes of the first bucket, and of the others
_ON_HOST = ("parameters", "gradients", "optimizer")  # under cpu_offload


@dataclass(frozen=True)
class Assumptions:
    """What is assumed of the machines. Bandwidths are bytes a second, of one rank and in one direction.

    Attributes:
        memory: Bytes of a device that tensors may take.
        flops: Floating-point operations a second that matrix products reach, in half precision.
        flops_32: The same in float32.
        memory_bandwidth: Of the device's memory.
        node_bandwidth: Between ranks of a node.
        network_bandwidth: Between nodes.
        host_bandwidth: Between a device and the host, for cpu_offload.
        latency: Seconds of a collective beside its bytes.
        overlap: Part of the computation beside which gathers and reductions run.
        staging: Copies that the backend makes of what it gathers or reduces: gloo 1, NCCL 0.
        is_host: Whether ranks compute on the CPU: all-gathers then start one unit ahead.
    """

    memory: float
    flops: float
    flops_32: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    latency: float
    overlap: float
    staging: int
    is_host: bool


DEVICES = {
    "h100": Assumptions(72e9, 450e12, 220e12, 2.7e12, 350e9, 45e9, 40e9, 3e-5, 0.8, 0, False),
    "a100": Assumptions(72e9, 160e12, 80e12, 1.6e12, 230e9, 22e9, 20e9, 3e-5, 0.8, 0, False),
    "cpu": Assumptions(8e9, 3e10, 3e10, 5e9, 1e9, 1e8, 5e9, 1e-3, 0.0, 1, True),
}


@dataclass(frozen=True)
class Layout:
    """Sizes and switches of the strategy; ``retains``: parameters stay gathered for the window."""

    data_parallel: str
    replicate: int
    shard: int
    tensor: int = 1
    context: int = 1
    recomputes: bool = False
    retains: bool = True
    offloads: bool = False

    def options(self) -> dict[str, object]:
        """Keywords of ``AutomodelStrategy`` that differ from their defaults."""
        is_sharded = self.data_parallel == "fsdp2"
        given = {
            "data_parallel": ("fsdp2" if is_sharded else "ddp", None),
            "data_parallel_replicate_size": (self.replicate if is_sharded else 1, 1),
            "tensor_parallel_size": (self.tensor, 1),
            "context_parallel_size": (self.context, 1),
            "activation_checkpointing": (self.recomputes, False),
            "reshard_during_accumulation": (not self.retains if is_sharded else None, None),
            "cpu_offload": (self.offloads, False),
        }
        return {name: value for name, (value, default) in given.items() if value != default}

    def __str__(self) -> str:
        text = f"HSDP {self.replicate} x {self.shard}" if self.replicate > 1 else f"FSDP2 {self.shard}"
        text = (
            f"{text} {'kept' if self.retains else 'freed'}"
            if self.data_parallel == "fsdp2"
            else f"DDP {self.replicate}"
        )
        sizes = f" TP {self.tensor}" * (self.tensor > 1) + f" CP {self.context}" * (self.context > 1)
        return text + sizes + " recomputed" * self.recomputes + " offloaded" * self.offloads


class Collectives(NamedTuple):
    """Collectives of one kind in an optimizer step of one rank; of each, the larger of what it gives and gets counts.

    Attributes:
        kind: As in torch: "all_gather", "reduce_scatter", "all_reduce", "broadcast".
        group: "shard", "replicate", "tokens", "tensor" or "context".
        ranks: Of the group.
        neighbours: How many of them are on one node.
        times: How many collectives.
        num_bytes: Of all of them.
    """

    kind: str
    group: str
    ranks: int
    neighbours: int
    times: int
    num_bytes: int

    def seconds(self, assumed: Assumptions) -> float:
        """As rings that share the links of a node; an all-reduce is a reduce-scatter and an all-gather."""
        passes = self.num_bytes * (2 if self.kind == "all_reduce" else 1)
        within = passes * (1 - 1 / self.neighbours) / assumed.node_bandwidth
        between = passes * (1 - self.neighbours / self.ranks) / (assumed.network_bandwidth * self.neighbours)
        return max(within, between) + self.times * assumed.latency


class Plan:
    """One layout of one model: ``micro`` is what a micro-batch does, ``accumulate`` how many a rank has in a step.

    ``memory`` has bytes by what they hold, where most is held; ``high_water`` is their sum. ``collectives`` and
    ``seconds`` are of one optimizer step.
    """

    def __init__(
        self, micro: MicroBatch, layout: Layout, accumulate: int, assumed: Assumptions, local_ranks: int, is_half: bool
    ) -> None:
        self.micro, self.layout, self.accumulate, self.assumed = micro, layout, accumulate, assumed
        self.local_ranks, self.is_half = local_ranks, is_half
        self._is_sharded = layout.data_parallel == "fsdp2"
        self._shards = layout.shard * layout.context if self._is_sharded else 1
        # By unit, the root last: parameters gathered, gradients as computed, as accumulated, as reduced, own shards.
        sizes = ([0] * (micro.num_units + 1) for _ in range(5))
        self._gathered, self._unsharded, self._accumulated, self._reduced, self._own = sizes
        self._held = Counter[str](inputs=micro.inputs)
        self._trained = [p for p in micro.parameters if p.is_trained]
        for p in micro.parameters:
            own = p.numel if self._is_whole(p) else p.shard(self._shards)
            self._held["parameters"] += own * p.itemsize
            self._held["optimizer"] += int(own * p.state)
            self._held["gradients"] += own * p.itemsize * p.is_trained  # of the step before, until a backward
            self._held["buckets"] += 0 if self._is_sharded else own * p.itemsize * p.is_trained
            if p.unit is not None and self._is_sharded:
                computed = micro.compute_itemsize or p.itemsize
                reduced = micro.reduce_itemsize or computed
                self._gathered[p.unit] += own * self._shards * computed
                self._unsharded[p.unit] += p.numel * computed * p.is_trained
                self._accumulated[p.unit] += p.numel * reduced * p.is_trained
                self._reduced[p.unit] += own * self._shards * reduced * p.is_trained
                self._own[p.unit] += own * p.itemsize * p.is_trained
        self._state = sum(self._held[name] for name in _ON_HOST)
        self.memory: dict[str, int] = {}
        self.high_water = 0
        self._follow()
        self.collectives = self._collectives()
        self.seconds = self._seconds()

    def _is_whole(self, parameter: Parameter) -> bool:
        return parameter.unit is None or not self._is_sharded

    # --- Memory -------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Follow an optimizer step through the layout."""
        self._ready: set[int] = set()  # units that are gathered
        self._started: set[int] = set()  # units whose all-gather runs
        rounds = min(self.accumulate, 2)  # of further ones, each is like the second
        for index in range(rounds):
            self._follow_micro_batch(index == 0, index == rounds - 1)
        own = sum(p.numel if self._is_whole(p) else p.shard(self._shards) for p in self._trained)
        self._see(0 if self.layout.offloads else int(self.micro.step_peak * own))

    def _follow_micro_batch(self, is_first: bool, is_last: bool) -> None:
        held, micro, unreduced, newest = self._held, self.micro, {self.micro.num_units}, 0
        self._gather(micro.num_units, 1)
        for event in micro.events:
            self._see(event.peak)
            held["activations"] += event.net
            if event.kind == "loss" and is_first:
                held["gradients"] = 0
            elif event.kind == "gradient":
                parameter = micro.parameters[event.index]
                is_whole = self._is_whole(parameter)
                newest = parameter.numel * ((not is_whole and micro.compute_itemsize) or parameter.itemsize)
                # FSDP2 adds to a gradient of another dtype once it has all of a unit.
                is_new = is_first or (not is_whole and self._accumulated != self._unsharded)
                held["gradients" if is_whole else "unsharded_gradients"] += newest if is_new else 0
                self._see(0 if is_new else newest)
                unreduced |= {parameter.unit or 0}
            elif event.kind in ("gather", "gather_again"):
                self._gather(event.index, 1 if event.kind == "gather" else -1)
            elif event.kind == "free" and not self.layout.retains:
                self._free(event.index)
            elif event.kind == "reduce":
                self._reduce(event.index, is_first, is_last)
                unreduced.discard(event.index)
        for unit in sorted(unreduced):  # autograd still holds the gradient that came last
            self._reduce(unit, is_first, is_last, newest)
        held["reducing"] = 0
        for unit in list(self._ready) if is_last else ():
            self._free(unit)

    def _gather(self, unit: int, ahead: int) -> None:
        """Gather a unit, which takes it twice for a while, and start the one that follows."""
        if unit not in self._ready:
            self._start(unit)
            self._held["gathered"] += self._gathered[unit]
            self._see(0)
            self._held["gathering"] -= self._gathered[unit]
            self._started.remove(unit)
            self._ready.add(unit)
        following = unit + ahead if unit < self.micro.num_units else 0
        if (self.assumed.is_host or ahead < 0) and 0 <= following < self.micro.num_units:
            self._start(following)

    def _start(self, unit: int) -> None:
        if unit not in self._ready | self._started:
            self._started.add(unit)
            self._held["gathering"] += self._gathered[unit]
            self._see(self.assumed.staging * self._gathered[unit])

    def _free(self, unit: int) -> None:
        if unit in self._ready:
            self._ready.remove(unit)
            self._held["gathered"] -= self._gathered[unit]

    def _reduce(self, unit: int, is_first: bool, is_last: bool, still: int = 0) -> None:
        """End a unit's backward; ``still`` bytes of its gradients are freed later."""
        fresh, accumulated = self._unsharded[unit], self._accumulated[unit]
        if not self.layout.retains:
            self._free(unit)
        if not is_first and self._accumulated != self._unsharded:
            self._held["unsharded_gradients"] -= fresh
        elif is_first and not is_last:
            self._held["unsharded_gradients"] += accumulated - fresh
        if is_last:
            self._held["reducing"] = self._reduced[unit]  # that of the unit before is freed
            self._see(0)
            self._held["unsharded_gradients"] -= fresh if is_first else accumulated
            self._held["gradients"] += self._own[unit]
            self._see(self.assumed.staging * self._reduced[unit] + min(still, fresh))

    def _see(self, extra: int) -> None:
        """Note what is held now, with ``extra`` bytes for a while, if it is the most."""
        on_device = {k: n for k, n in self._held.items() if n and not (self.layout.offloads and k in _ON_HOST)}
        total = sum(on_device.values()) + extra
        if total > self.high_water:
            self.high_water, self.memory = total, {**on_device, "for a while": extra}

    # --- Communication and time ---------------------------------------------------------------------------------------

    def _collectives(self) -> list[Collectives]:
        """The largest first."""
        layout, micro, times, sent = self.layout, self.micro, self.accumulate, Counter[tuple[str, str, int]]()
        for unit, size in enumerate(self._gathered):
            again = 1 if unit == micro.num_units else 2
            sent["shard", "all_gather", size] += 1 if layout.retains else times * again
            sent["shard", "reduce_scatter", self._reduced[unit]] += 1
            sent["replicate", "all_reduce", self._reduced[unit] // self._shards] += 1
        whole = [p for p in self._trained if p.unit is None] if self._is_sharded else []
        sent["tokens", "all_reduce", sum((p.numel + 1) * p.itemsize for p in whole)] += 1
        if not self._is_sharded:
            for size in _ddp_buckets([micro.parameters[e.index] for e in micro.events if e.kind == "gradient"]):
                sent["tokens", "all_reduce", size] += 1
        sent["tokens", "broadcast", micro.buffers[self._is_sharded]] += 1
        # Of a window its count, loss and number of micro-batches, and which sharded parameters were used.
        tracked = len(self._trained) - len(whole) if self._is_sharded else 0
        sent["tokens", "all_reduce", 8 * (3 + tracked)] += 1
        for key, number in micro.messages.items():
            sent[key] += number * times
        made: list[Collectives] = []
        for group, kind in sorted({(group, kind) for group, kind, size in sent if size}):
            sizes = {size: n for (g, k, size), n in sent.items() if (g, k) == (group, kind) and size}
            ranks, apart = self._ranks(group)
            neighbours = max(1, min(ranks, self.local_ranks // apart))
            total = sum(size * number for size, number in sizes.items())
            made.append(Collectives(kind, group, ranks, neighbours, sum(sizes.values()), total))
        return sorted((each for each in made if each.ranks > 1), key=lambda each: -each.num_bytes)

    def _ranks(self, group: str) -> tuple[int, int]:
        """Ranks of a group, and how far apart: tensor peers are neighbours, then come context peers, then shards."""
        layout, whole = self.layout, self.layout.replicate * self.layout.shard * self.layout.context
        return {
            "tensor": (layout.tensor, 1),
            "context": (layout.context, layout.tensor),
            "shard": (self._shards, layout.tensor),
            "replicate": (layout.replicate if self._is_sharded else 1, layout.tensor * self._shards),
            "tokens": (whole, layout.tensor),
        }[group]

    def bytes_between_nodes(self) -> int:
        """Of groups that span nodes, in one optimizer step."""
        return sum(each.num_bytes for each in self.collectives if each.ranks > each.neighbours)

    def _seconds(self) -> dict[str, float]:
        assumed, times = self.assumed, self.accumulate
        speed = assumed.flops if self.is_half else assumed.flops_32
        sizes = [(max(f / speed, b / assumed.memory_bandwidth), n) for (f, b), n in self.micro.work.items()]
        one = sum(seconds * number for seconds, number in sizes)
        # Peers wait for each other within a layer; what goes over data-parallel ranks runs beside the computation.
        waits, hides = 0.0, 0.0
        for each in self.collectives:
            if each.group in ("tensor", "context"):
                waits += each.seconds(assumed)
            else:
                hides += each.seconds(assumed)
        hidden = min(hides, assumed.overlap * one * (1 if self.layout.retains else times))
        link = assumed.host_bandwidth if self.layout.offloads else assumed.memory_bandwidth
        found = {"compute": one * times, "optimizer": 2 * self._state / link, "communicate": waits + hides}
        return {**found, "hidden": hidden, "step": sum(found.values()) - hidden}

    def with_layout(self, layout: Layout) -> "Plan":
        """The plan of another layout with the same sizes and recomputation."""
        return Plan(self.micro, layout, self.accumulate, self.assumed, self.local_ranks, self.is_half)


def _ddp_buckets(ready: list[Parameter]) -> list[int]:
    """Bytes of DDP's buckets, which it fills in the order in which gradients are ready."""
    buckets = [0]
    for parameter in ready:
        if buckets[-1] >= _DDP_BUCKETS[min(len(buckets) - 1, 1)]:
            buckets.append(0)
        buckets[-1] += parameter.numel * parameter.itemsize
    return buckets
