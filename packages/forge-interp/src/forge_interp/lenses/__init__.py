"""What a model would predict at every site."""
