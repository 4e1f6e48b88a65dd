"""Context parallelism: ranks that share a batch, each with a slice of its sequences."""
