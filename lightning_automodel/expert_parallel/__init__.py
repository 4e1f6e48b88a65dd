"""Expert parallelism: the experts of a mixture spread over ranks that hold different tokens."""
