"""Which rank sees which data."""
