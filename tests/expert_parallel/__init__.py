"""Expert parallelism: spread experts compared with one process that holds all of them."""
