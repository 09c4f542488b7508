"""The controller's half of vetting: what is known of nodes over sessions, and what is done about unfit ones."""
