"""One rank of one run; the only code that imports torch."""
