"""What the callback ExactnessCheck records, replays, compares and says."""
