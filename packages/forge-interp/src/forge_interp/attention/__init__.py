"""What attention looked at."""
