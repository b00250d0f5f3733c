"""Which sample comes when: a pure function of one integer."""
