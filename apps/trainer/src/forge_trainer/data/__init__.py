"""What a run trains on and is evaluated on."""
