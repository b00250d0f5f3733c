"""Many runs that answer one question: which there are, running them, and what they say together."""
