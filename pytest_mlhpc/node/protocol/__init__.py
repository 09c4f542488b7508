"""What controller and nodes tell each other: the plan, the channel of ranks, and what a run measured."""
