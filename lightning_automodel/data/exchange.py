"""An all-gather of a few numbers that runs while the device computes."""

import torch
import torch.distributed as dist


class Exchange:
    """Starts an asynchronous all-gather of numbers over the group. A collective that waits only when read.

    Args:
        group: Host process group of all ranks.
        *numbers: This rank's numbers; equally many on each rank.
    """

    def __init__(self, group: dist.ProcessGroup, *numbers: float) -> None:
        # Both tensors must outlive the communication.
        self._own = torch.tensor(numbers, device="cpu", dtype=torch.float64)
        self._everyone = [torch.empty_like(self._own) for _ in range(group.size())]
        self._work = dist.all_gather(self._everyone, self._own, group, async_op=True)

    def _received(self) -> list[torch.Tensor]:
        if self._work is not None:
            self._work.wait()
        return self._everyone

    def numbers(self) -> list[int]:
        """The first number of each rank, by rank. Waits until all ranks have sent."""
        return [int(each[0]) for each in self._received()]

    def sums(self) -> list[float]:
        """The sum of each number over all ranks. Waits until all ranks have sent."""
        return torch.stack(self._received()).sum(0).tolist()
