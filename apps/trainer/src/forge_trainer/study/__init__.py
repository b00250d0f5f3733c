"""Studies, many runs that answer one question: lists the runs, runs them and analyses their results."""
