"""Which parts write a logit, and how are parts connected?"""
