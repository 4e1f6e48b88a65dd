import sys, logging, warnings
from pathlib import Path
import tempfile
warnings.filterwarnings("ignore")
from tests.rank_pool import RankPool
from tests.trainer.resuming import *

CASES = [("on_validation_end",3), ("on_train_epoch_end", 1),("on_train_epoch_start",2)] if len(sys.argv)>2 else [
 ("on_train_batch_end", 3),("on_train_batch_end", 4), ("on_train_batch_end", 7), ("on_train_batch_end", 10), ("on_validation_end", 1),("on_validation_end", 2), ("on_validation_end",3), ("on_train_epoch_end", 1), ("on_train_batch_start", 5),
 ("on_train_start", 1), ("on_train_epoch_start",2), ("on_validation_batch_end", 2), ("on_before_optimizer_step", 3), ("on_fit_start",1), ("on_train_batch_end",14), ("on_train_end",1), ("on_train_epoch_end",2),
]
def job(strategy, trainer, learner, loader, folder, cases):
    import lightning_automodel; assert "/tmp/wt/c" in lightning_automodel.__file__
    import logging; logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    return compare(Setting(strategy, trainer, learner, loader), Path(folder), *cases)
if __name__ == "__main__":
    import time
    pool = RankPool(2)
    try:
        for strategy in ({"data_parallel": "ddp"}, {}):
            for loader in ("own generator", "global generator", "distributed"):
                for trainer in ({"precision": "32-true", "accumulate_grad_batches": 3, "val_check_interval": 2, "max_epochs": 2}, {"precision":"64-true", "max_epochs": 2}):
                    t=time.time()
                    with tempfile.TemporaryDirectory() as f:
                        r = pool.run(job, strategy, trainer, {}, loader, f, CASES, timeout_s=400)
                    print(strategy, loader, trainer, f"{time.time()-t:.1f}s")
                    for rank in (0,1):
                        for d in r[rank][:12]: print("  rank",rank,d[:400])
                    if len(sys.argv)>1: sys.exit()
    finally: pool.stop()
