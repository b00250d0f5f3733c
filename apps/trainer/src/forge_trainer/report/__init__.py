"""Reports about runs: announcement, status, comparison and the HTML page."""
