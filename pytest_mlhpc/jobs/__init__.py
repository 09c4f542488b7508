"""What is to be run: job specs that tests declare, and the queue, ledger and locks that turn them into runs."""
