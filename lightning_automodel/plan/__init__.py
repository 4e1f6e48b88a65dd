"""What a run would need, before there is one: ``python -m lightning_automodel.plan module:function --world-size 64``."""
