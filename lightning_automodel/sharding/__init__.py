"""How the model is held on many ranks, and what each micro-batch communicates."""
