"""No torch. What is read of a node's processes and devices while a program runs."""
