"""The algebra of token-weighted gradients: counting, windows, rescaling, clipping."""
