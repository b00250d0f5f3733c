"""Configurations of other training stacks in the keys of this one."""
