"""One session of pytest: from declared tests over submitted jobs to judged outcomes and records."""
