"""Which form the checkpoints of a run have: directories of shards, or single files."""

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO


class CheckpointForm:
    """The form of a strategy's checkpoints. Nothing here is a collective.

    Args:
        is_sharded: Whether the model is sharded.
        as_directory: What the user chose: directories of shards, or single files. None lets :meth:`choose`
            decide.
    """

    def __init__(self, is_sharded: bool, as_directory: bool | None) -> None:
        self.is_sharded = is_sharded
        self._chosen = as_directory
        if as_directory is None:
            self.as_directory = is_sharded
        else:
            self.as_directory = as_directory

    def choose(self, io: CheckpointIO, world_size: int) -> str | None:
        """Decide, for a run of ``world_size`` ranks, whether checkpoints are directories.

        Returns:
            A note for the user if the choice is not the usual one.

        Raises:
            ValueError: If the user asked for directories, on which ``io``, the Trainer's plugin, has no
                effect.
        """
        is_plugin = type(io) is not TorchCheckpointIO
        if self._chosen is None:
            # A single rank has no use for a directory, and any program can read one file.
            has_shares = self.is_sharded and world_size > 1
            self.as_directory = has_shares and not is_plugin
            if is_plugin and has_shares:
                return (
                    f"{type(io).__name__} writes the checkpoints, one file each, for which rank 0 needs host"
                    " memory for the whole state: for directories of shards, which need no more than a"
                    " rank's share, leave the plugin out."
                )
        elif self._chosen and is_plugin:
            raise ValueError(
                "save_distributed_checkpoint=True writes directories of shards, on which"
                f" {type(io).__name__} would have no effect: leave the plugin out, or pass"
                " save_distributed_checkpoint=False, with which it writes one file."
            )
        return None
