"""What happens when a rank fails, is stopped, or misses its heartbeats."""
