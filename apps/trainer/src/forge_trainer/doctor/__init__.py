"""`forge doctor`: whether this machine, and a folder for runs, can do what training needs of them."""
