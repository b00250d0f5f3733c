"""What a TOML file may say of a run; nothing here imports torch."""
