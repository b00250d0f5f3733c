"""Vision towers, which compute features of images."""
