"""Numbers of each rank, sent while the device computes."""

import torch
import torch.distributed as dist


class Exchange:
    """Tells all ranks some numbers, and receives theirs. A collective over the group, which nobody waits for yet.

    Args:
        group: All ranks, on the host.
        *numbers: Of this rank; as many on each.
    """

    def __init__(self, group: dist.ProcessGroup, *numbers: float) -> None:
        # Both must outlive the communication.
        self._own = torch.tensor(numbers, device="cpu", dtype=torch.float64)
        self._everyone = [torch.empty_like(self._own) for _ in range(group.size())]
        self._work = dist.all_gather(self._everyone, self._own, group, async_op=True)

    def _received(self) -> list[torch.Tensor]:
        if self._work is not None:
            self._work.wait()
        return self._everyone

    def numbers(self) -> list[int]:
        """The first of each rank, by rank. Waits until all have sent theirs."""
        return [int(each[0]) for each in self._received()]

    def sums(self) -> list[float]:
        """Of each number, over all ranks. Waits until all have sent theirs."""
        return torch.stack(self._received()).sum(0).tolist()
