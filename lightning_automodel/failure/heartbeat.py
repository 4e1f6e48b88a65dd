"""A rank's sign of life, as the ranks read it from the store."""

from dataclasses import dataclass

FINISHED = b"finished"


@dataclass(frozen=True)
class Sign:
    """A rank's newest sign of life.

    Attributes:
        value: As it stands in the store: a number that grows, host and hook; ``NONE`` before the first.
        changed_at: When this process first saw it, in seconds of its monotonic clock.
    """

    value: bytes
    changed_at: float

    @property
    def finished(self) -> bool:
        """Whether the rank said that it is done."""
        return self.value == FINISHED

    @property
    def host(self) -> str:
        """The machine of the rank."""
        return self._part(1) or "an unknown host"

    @property
    def where(self) -> str:
        """The hook that the rank was in."""
        return self._part(2) or "set-up"

    def _part(self, index: int) -> str:
        parts = self.value.decode().split("|", 2)
        return parts[index] if len(parts) == 3 else ""
