"""A number of each rank, sent while the device computes."""

import torch
import torch.distributed as dist


class Exchange:
    """Tells all ranks a number, and receives theirs. A collective over the group, which nobody waits for yet.

    Args:
        group: All ranks, on the host.
        number: Of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        # Both must outlive the communication.
        self._own = torch.tensor(number, device="cpu")
        self._everyone = [torch.empty_like(self._own) for _ in range(group.size())]
        self._work = dist.all_gather(self._everyone, self._own, group, async_op=True)

    def numbers(self) -> list[int]:
        """Those of all ranks, by rank. Waits until all have sent theirs."""
        if self._work is not None:
            self._work.wait()
        return [int(each) for each in self._everyone]
