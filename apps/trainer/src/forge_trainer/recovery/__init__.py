"""What follows trouble."""
