"""The command line: inspect, consolidate and export checkpoints."""
