"""What runs on an allocation's nodes: reads the plan, launches each run, relays its lines, keeps time."""
