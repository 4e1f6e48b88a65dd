"""Sharding and replication of the model, and what each micro-batch communicates."""
