"""`forge doctor`: checks whether this machine and a folder for runs support training."""
