"""What happens when a rank fails, is stopped, or goes silent."""
