"""What a run would need: ``python -m lightning_automodel.plan module:function --world-size 64``."""
